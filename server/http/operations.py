"""The operations of an OpenAPI document, for /capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.http.body import JSON
from server.http.openapi import EVENTS, LINES, TASK, Task

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str  # in capitals
    path: str
    description: str
    parameters: Mapping[str, Schema]  # the fields of a JSON body, by name
    required: frozenset[str]
    task: Task | None = None  # of the model; None: every model has the operation
    streams: bool = False


def operations(document: Schema) -> Iterator[Operation]:
    """Yield every operation of an OpenAPI document, in its order."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield _operation(document, method.upper(), path, operation)


def _operation(document: Schema, method: str, path: str, operation: Schema) -> Operation:
    contents = operation.get("requestBody", {}).get("content", {})
    body = resolved(document, contents.get(JSON, {}).get("schema", {}))
    answers = operation.get("responses", {}).get("200", {}).get("content", {})
    return Operation(
        method=method,
        path=path,
        description=operation.get("description", ""),
        parameters=body.get("properties", {}),
        required=frozenset(body.get("required", ())),
        task=operation.get(TASK),
        streams=EVENTS in answers or LINES in answers,
    )


def resolved(document: Schema, schema: Schema) -> Schema:
    """Return the schema that a reference into the document names, or `schema` itself."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    node: Any = document
    for step in reference.removeprefix("#/").split("/"):
        node = node[step]
    return resolved(document, node)


def without_null(schema: Schema) -> Schema:
    """Return a schema without its branch for null, which means the same as an absent field."""
    branches = [branch for branch in schema.get("anyOf", ()) if branch != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "title")}
    if rest.get("default", 0) is None:
        del rest["default"]
    if len(branches) == 1:
        return {**branches[0], **rest}
    return {"anyOf": branches, **rest} if branches else rest
