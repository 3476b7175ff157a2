"""The OpenAPI 3.1 document at /openapi.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
from fastapi import FastAPI

from server.http.openapi import TOKEN_ID, describe_body

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
        schemas |= document.get("components", {}).get("schemas", {})  # those of typed answers
        document["components"] = {"schemas": schemas}
        if self._keyed:
            document["components"]["securitySchemes"] = {"key": BEARER}
            document["security"] = [{"key": []}]
        for operations in document["paths"].values():
            for operation in operations.values():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    describe_body(content)
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
