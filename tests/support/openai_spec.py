"""OpenAI's own OpenAPI document, to validate answers with its schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

STREAM_EVENTS = "ResponseStreamEvent"  # any event of a streamed response
NULLABLE = "nullable"  # a word of OpenAPI 3.0 that the document, of version 3.1, also uses


def with_nulls(schema: Any) -> Any:
    """Return a schema, or a part of one, in which `nullable: true` is said in JSON Schema."""
    if isinstance(schema, list):
        return [with_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {name: with_nulls(value) for name, value in schema.items() if name != NULLABLE}
    if schema.get(NULLABLE) is True:
        return {"anyOf": [rest, {"type": "null"}]}
    return rest


class OpenAISpec:
    """The schemas of openapi.yaml by name."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as source:
            document = yaml.load(source, Loader=yaml.CSafeLoader)
        self._schemas: dict[str, Any] = with_nulls(document["components"]["schemas"])
        self.validator = cache(self._validator)

    def check(self, name: str, value: Any) -> None:
        """Raise jsonschema.ValidationError unless `value` has the schema of this name."""
        self.validator(name).validate(value)

    def check_event(self, event: Any) -> None:
        """Check an event of a streamed response with the schema of its type."""
        self.check(self._event_schemas()[event["type"]], event)

    def _validator(self, name: str) -> Draft202012Validator:
        root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": self._schemas}}
        return Draft202012Validator(root)

    def _event_schemas(self) -> dict[str, str]:
        """Return the names of the schemas of stream events, by type."""
        found = {}
        for member in self._schemas[STREAM_EVENTS]["anyOf"]:
            name = member["$ref"].rpartition("/")[2]
            [kind] = self._schemas[name]["properties"]["type"]["enum"]
            found[kind] = name
        return found


def sse_events(stream: str) -> list[dict[str, Any]]:
    """Return the data of named server-sent events, each checked to be named after its type."""
    *events, rest = stream.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        if event.startswith(":"):
            continue  # a ping
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found
