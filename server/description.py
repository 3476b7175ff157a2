"""openapi.json: what is served, for programs that read it (OpenAPI 3.1)."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.schemas.body import JSON, Body

REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "title": "Error",
    "description": "What every answer that is not 2xx holds, those of probes apart.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field it is about."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
BEARER = {"type": "http", "scheme": "bearer"}
# Of an application: whatever its operations answer beside what they say themselves.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Refused, or failed",
        "content": {JSON: {"schema": {"$ref": REFERENCE.format(model="Error")}}},
    }
}
# Of an operation that is open to all, and answers a 503 with the same body as a 200.
PROBE: dict[str, Any] = {
    "responses": {"503": {"description": "No, with the reason as status", "content": {JSON: {}}}},
    "security": [],
}


def documented(kind: type[Body], *, streams: bool = False) -> dict[str, Any]:
    """Of an operation that reads such a body, and may answer with events."""
    schema = kind.model_json_schema(ref_template=REFERENCE)
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {JSON: {"schema": schema}}}
    }
    if streams:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return extra


class DescribedApp(FastAPI):
    """An application whose description is of one piece: schemas refer to its components."""

    def __init__(self, *, keyed: bool, **facts: Any) -> None:
        super().__init__(**facts)
        self._keyed = keyed

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self._complete(super().openapi())  # which keeps it
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
