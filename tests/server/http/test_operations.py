"""The operations that /capabilities reads from the OpenAPI document."""

from __future__ import annotations

from typing import Any

from server.app import api_document
from server.http.operations import operations, resolved


def test_operations_parameters_all_have_a_description() -> None:
    missing = [
        f"{operation.path}: {name}"
        for operation in operations(api_document())
        for name, schema in operation.parameters.items()
        if not schema.get("description")
    ]
    assert missing == []


def test_operations_resolve_a_body_that_is_a_reference() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    document: dict[str, Any] = {
        "components": {"schemas": {"A": schema, "B": {"$ref": "#/components/schemas/A"}}},
    }
    assert resolved(document, {"$ref": "#/components/schemas/B"}) == schema
