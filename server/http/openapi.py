"""The OpenAPI 3.1 document at /openapi.json."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.http.body import JSON, Body

REFERENCE = "#/components/schemas/{model}"
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
BEARER = {"type": "http", "scheme": "bearer"}
# Response that every operation has in addition to those it declares.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "The request was refused or failed.",
        "content": {JSON: {"schema": {"$ref": REFERENCE.format(model="Error")}}},
    }
}
# For an operation that needs no key and whose 503 has the same body as its 200.
PROBE: dict[str, Any] = {
    "responses": {"503": {"description": "Unavailable; see `status`.", "content": {JSON: {}}}},
    "security": [],
}


def body_schema(kind: type[Body], *, streams: bool = False) -> dict[str, Any]:
    """Return the `openapi_extra` of an operation that reads a body of type `kind`.

    With `streams`, its response may also be a stream of server-sent events.
    """
    schema = kind.model_json_schema(ref_template=REFERENCE)
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {JSON: {"schema": schema}}}
    }
    if streams:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return extra


class OpenApiApp(FastAPI):
    """A FastAPI application whose OpenAPI schemas are all under `components`."""

    def __init__(self, *, keyed: bool, **facts: Any) -> None:
        super().__init__(**facts)
        self._keyed = keyed

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self._complete(super().openapi())  # FastAPI caches the document
        return super().openapi()

    def _complete(self, document: dict[str, Any]) -> None:
        schemas: dict[str, Any] = {"Error": ERROR}
        document["components"] = {"schemas": schemas}
        if self._keyed:
            document["components"]["securitySchemes"] = {"key": BEARER}
            document["security"] = [{"key": []}]
        for operations in document["paths"].values():
            for operation in operations.values():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    schemas |= content["schema"].pop("$defs", {})
