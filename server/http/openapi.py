"""The OpenAPI 3.1 document at /openapi.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import orjson
from fastapi import FastAPI
from pydantic import AliasChoices

from server.http.body import JSON, Body

REFERENCE = "#/components/schemas/{model}"
TOKEN_ID = "Token id"  # the title of schemas of token ids, which depend on the model
TASK = "x-task"  # the member of an operation that names its task
Task = Literal["generate", "embed"]
# Members of the schema of a body, and of one of its fields.
ACCEPTED = "x-accepted-without-effect"  # names of fields
UNSUPPORTED = "x-unsupported"  # names of fields, with the values that are accepted
UNDESCRIBED = "x-undescribed"  # fields that JSON Schema cannot describe, with their texts
OTHER_NAMES = "x-other-names"  # names of the field in other APIs
ERROR = {
    "type": "object",
    "title": "Error",
    "description": "Body of every response outside 2xx, except those of the probes.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "title": "AnthropicError",
    "description": "Body of every response outside 2xx of Anthropic's API.",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
BEARER = {"type": "http", "scheme": "bearer"}


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
    """
    schema = kind.model_json_schema(ref_template=REFERENCE)
    _complete_properties(kind, schema["properties"])
    schema[ACCEPTED] = sorted(kind.ACCEPTED)
    schema[UNSUPPORTED] = {name: list(values) for name, values in sorted(kind.UNSUPPORTED.items())}
    schema[UNDESCRIBED] = {
        name: field.description or ""
        for name, field in kind.model_fields.items()
        if name not in schema["properties"]
    }
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {JSON: {"schema": schema}}}
    }
    if streams:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
        task = "generate"
    if binary:
        extra["responses"] = {"200": {"content": {"application/octet-stream": {}}}}
    if task is not None:
        extra[TASK] = task
    return extra


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


class OpenApiApp(FastAPI):
    """A FastAPI application whose OpenAPI schemas are all under `components`.

    `vocab_size` returns the number of token ids, or None before the model is loaded. The schemas
    then say which token ids this model has. The document leaves out the paths in `disabled`.
    """

    def __init__(
        self,
        *,
        keyed: bool,
        vocab_size: Callable[[], int | None],
        disabled: Sequence[str] = (),
        **facts: Any,
    ) -> None:
        super().__init__(openapi_url=None, **facts)
        self._disabled = disabled
        self._keyed = keyed
        self._vocab_size = vocab_size
        self._rendered: tuple[int | None, bytes] | None = None

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self._complete(super().openapi())  # FastAPI caches the document
        document = super().openapi()
        if (size := self._vocab_size()) is not None:
            for schema in _objects(document):
                if schema.get("title") == TOKEN_ID and "pattern" in schema:
                    schema["pattern"] = f"^({up_to(size - 1)})$"
                elif schema.get("title") == TOKEN_ID:
                    schema["maximum"] = size - 1
        return document

    def openapi_json(self) -> bytes:
        """Return the document as JSON. It is made once for each size of the vocabulary."""
        size = self._vocab_size()
        if self._rendered is None or self._rendered[0] != size:
            self._rendered = size, orjson.dumps(self.openapi())
        return self._rendered[1]

    def _complete(self, document: dict[str, Any]) -> None:
        for path in self._disabled:
            document["paths"].pop(path, None)
        schemas: dict[str, Any] = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
        document["components"] = {"schemas": schemas}
        if self._keyed:
            document["components"]["securitySchemes"] = {"key": BEARER}
            document["security"] = [{"key": []}]
        for operations in document["paths"].values():
            for operation in operations.values():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    for name, schema in content["schema"].pop("$defs", {}).items():
                        known = schemas.setdefault(name, schema)
                        assert known == schema, f"two models are named {name}"
        for schema in _objects(document):
            if schema.get("type") == "integer":  # FastAPI makes floats of the bounds
                schema |= {k: int(schema[k]) for k in ("minimum", "maximum") if k in schema}


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Return all objects inside a JSON value."""
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _objects(inner)


def up_to(limit: int) -> str:
    """Return a regular expression for the decimal numbers from 0 to `limit`."""
    digits = str(limit)
    ways = ["0"] if limit else []
    ways += [f"[1-9][0-9]{{{length}}}" for length in range(len(digits) - 1)]
    for index, digit in enumerate(digits):
        least = 1 if index == 0 else 0
        if int(digit) > least:
            rest = len(digits) - index - 1
            ways.append(f"{digits[:index]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join([*ways, digits])
