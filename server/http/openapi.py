"""The description of a route in the OpenAPI document: its body, task and refusals."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import AliasChoices

from server.http.body import JSON, Body

REFERENCE = "#/components/schemas/{model}"
# The media types of streams: server-sent events, and lines of JSON.
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
TOKEN_ID = "Token id"  # the title of schemas of token ids, which depend on the model
TASK = "x-task"  # the member of an operation that names its task
Task = Literal["generate", "embed", "score", "classify"]
BODY = "x-body"  # the member in place of a schema: "module:class" of the body
# Members of the schema of a body, and of one of its fields.
ACCEPTED = "x-accepted-without-effect"  # names of fields
UNSUPPORTED = "x-unsupported"  # names of fields, with the values that are accepted
UNDESCRIBED = "x-undescribed"  # fields that JSON Schema cannot describe, with their texts
OTHER_NAMES = "x-other-names"  # names of the field in other APIs


def refusals(model: str) -> dict[int | str, dict[str, Any]]:
    """Return the response that operations have in addition to those they declare."""
    schema = {"$ref": REFERENCE.format(model=model)}
    description = "The request was refused or failed."
    return {"default": {"description": description, "content": {JSON: {"schema": schema}}}}


RESPONSES = refusals("Error")
ANTHROPIC_RESPONSES = refusals("AnthropicError")
# For an operation that needs no key and whose 503 has the same body as its 200.
PROBE: dict[str, Any] = {
    "responses": {"503": {"description": "Unavailable; see `status`.", "content": {JSON: {}}}},
    "security": [],
}


def body_schema(
    kind: type[Body],
    *,
    streams: bool = False,
    binary: bool = False,
    task: Task | None = None,
) -> dict[str, Any]:
    """Return the `openapi_extra` of an operation that reads a body of type `kind`.

    With `streams`, its response may also be a stream of server-sent events, and with `binary`
    bytes. `task` is the one that a model must do; operations that stream generate. None: an
    operation of every model.

    The schema of the body is made with the document, by `describe_body`: those of all bodies take
    a fifth of the start of a server.
    """
    place = f"{kind.__module__}:{kind.__qualname__}"
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {JSON: {BODY: place}}}}
    if streams:
        extra["responses"] = {"200": {"content": {EVENTS: {}}}}
        task = "generate"
    if binary:
        extra["responses"] = {"200": {"content": {"application/octet-stream": {}}}}
    if task is not None:
        extra[TASK] = task
    return extra


def describe_body(content: dict[str, Any]) -> None:
    """Put the schema of a body in the place that `body_schema` left for it, if it did."""
    if (place := content.pop(BODY, None)) is not None:
        content["schema"] = _without_null(_schema_of(resolve_name(place)))


def _schema_of(kind: type[Body]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=REFERENCE)
    _complete_properties(kind, schema["properties"])
    schema[ACCEPTED] = sorted(kind.ACCEPTED)
    schema[UNSUPPORTED] = {name: list(values) for name, values in sorted(kind.UNSUPPORTED.items())}
    schema[UNDESCRIBED] = {
        name: field.description or ""
        for name, field in kind.model_fields.items()
        if name not in schema["properties"]
    }
    return schema


def _without_null(node: Any) -> Any:
    """Leave out members that are null, as FastAPI does in the rest of the document."""
    if isinstance(node, list):
        return [_without_null(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {name: _without_null(value) for name, value in node.items() if value is not None}


def _complete_properties(kind: type[Body], properties: dict[str, Any]) -> None:
    """Set the defaults of the fields, and the other names that they have."""
    for name, schema in properties.items():
        is_boolean = {"type": "boolean"} in schema.get("anyOf", ())
        if name in kind.DEFAULTS:
            schema["default"] = kind.DEFAULTS[name]
        elif is_boolean and len(schema["anyOf"]) == 2:  # the other one is null
            schema["default"] = False
        field = kind.model_fields.get(name)
        aliases = field.validation_alias if field else None
        if isinstance(aliases, AliasChoices):
            schema[OTHER_NAMES] = [alias for alias in aliases.choices if alias != name]
