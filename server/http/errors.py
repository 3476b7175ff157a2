"""The error contract: one table from exceptions to error responses.

Every response outside 2xx has the body {"error": {message, type, param, code}} of OpenAI's API,
with a string or null as `code`. On the paths of Anthropic's and Ollama's APIs it has the body of
that API, and on vLLM's /pooling the types of vLLM. The message of a 5xx is fixed. An exception's
own text may contain paths or addresses and goes to the log only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import orjson
import pydantic
from starlette.exceptions import HTTPException

from engine.errors import EngineOverloadedError, EngineUnavailableError, RequestRejectedError
from server.text.chat_template import TemplateError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Paths of Anthropic's API, also behind a base URL that ends in /v1, which its clients add.
ANTHROPIC_PATH = re.compile(r"(/v1)*/messages(/.*)?")
VLLM_PATH = re.compile(r"/pooling")
OLLAMA_PATH = re.compile(r"/api/.*|/v1/systemone")
VLLM_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
ANTHROPIC_TYPES = TYPES | {
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
NO_RETRY = {"x-should-retry": "false"}  # the same request would fail again
# Error codes for pydantic's error types; all other types become invalid_value.
VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unsupported_parameter",
    "unsupported": "unsupported_parameter",
}
FIELD_CODES = ("invalid_value", *VALIDATION_CODES.values())
JSON_WORDS = dict.fromkeys(("model_type", "dict_type"), "Input should be an object")
OF_THE_VALUE = re.compile(r".*_type|(greater|less)_than(_equal)?")  # the message quotes the value
UNAVAILABLE = {
    "loading": ("model_loading", "The model is still loading.", {"retry-after": "5"}),
    "draining": (
        "shutting_down",
        "The server is shutting down.",
        {"retry-after": "1", "connection": "close"},
    ),
    "dead": ("engine_unavailable", "The engine is not running.", {"retry-after": "10"}),
}
STEP = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}|[0-9]{1,9}")  # `param` omits longer names


@dataclass(eq=False)
class ApiError(Exception):
    """An error response. Its `type` follows from the status."""

    status: int
    code: str
    message: str
    _: KW_ONLY
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str, path: str = "") -> bytes:
        """Return the JSON of the error, in the format of the API that `path` belongs to."""
        if ANTHROPIC_PATH.fullmatch(path):
            return self._anthropic_body(request_id)
        server_side = self.status >= 500
        if OLLAMA_PATH.fullmatch(path):
            return self._ollama_body(request_id if server_side else "")
        message = self.message
        if self.code in FIELD_CODES:  # clients know OpenAI's words for the others
            message = self._message_with_field()
        kind = TYPES.get(self.status, "server_error" if server_side else "invalid_request_error")
        if VLLM_PATH.fullmatch(path):
            kind = VLLM_TYPES.get(self.status, kind)
        error = {
            "message": f"{message} (request {request_id})" if server_side else message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def _anthropic_body(self, request_id: str) -> bytes:
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = ANTHROPIC_TYPES.get(self.status, default)
        error = {"type": kind, "message": self._message_with_field()}
        return orjson.dumps({"type": "error", "error": error, "request_id": request_id})

    def _ollama_body(self, request_id: str) -> bytes:
        """Return the error of Ollama's API, also as a line of a stream: in ASCII."""
        text = self._message_with_field()
        if request_id:
            text += f" (request {request_id})"
        return json.dumps({"error": text}).encode()

    def _message_with_field(self) -> str:
        """Return the message, which names the field: Anthropic's errors have no `param`, and many
        clients show nothing else.
        """
        if self.param is None or re.search(rf"\b{re.escape(self.param)}\b", self.message):
            return self.message
        return f"{self.param}: {self.message}"


class StreamBroken(Exception):
    """A stream has failed after its status was sent.

    The last event of its body describes `error`. The body then ends without `[DONE]`.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ClientGone(Exception):
    """The client has closed the connection, so no response is sent."""


class ClientStalled(ClientGone):
    """The client has not read its stream for --send-timeout seconds."""


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", message, param=param)


def numerical_error() -> ApiError:
    return ApiError(
        500,
        "numerical_error",
        "The model's output for this request contains NaN or infinity.",
        headers=NO_RETRY,
    )


def to_api_error(error: BaseException, *, draining: bool = False) -> ApiError:
    """Return the error response for any exception.

    While the server drains, an unavailable engine is reported as `shutting_down`, not as a fault.
    """
    match error:
        case ApiError():
            return error
        case pydantic.ValidationError():
            return _from_validation(error)
        case TemplateError():
            return invalid("messages", f"The chat template cannot render the messages: {error}")
        case RequestRejectedError(code="server_overloaded"):
            return ApiError(503, error.code, error.message, headers={"retry-after": "5"})
        case RequestRejectedError():
            return ApiError(400, error.code, error.message, param=error.param)
        case EngineOverloadedError():
            retry = {"retry-after": str(error.retry_after)}
            return ApiError(503, "server_overloaded", str(error), headers=retry)
        case EngineUnavailableError():
            state = "draining" if draining else error.state
            code, message, headers = UNAVAILABLE[state]
            return ApiError(503, code, message, headers=headers)
        case HTTPException():
            code = HTTP_CODES.get(error.status_code, "invalid_value")
            message = f"{error.detail}. GET /openapi.json lists the served paths."
            return ApiError(error.status_code, code, message, headers=error.headers or {})
    return ApiError(
        500,
        "internal_error",
        "Internal server error; the server's log has the cause.",
        headers=NO_RETRY,
    )


def _from_validation(error: pydantic.ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = _dotted([*first["loc"], *first.get("ctx", {}).get("path", ())])
    kind = first["type"]
    message = JSON_WORDS.get(kind, first["msg"])
    if OF_THE_VALUE.fullmatch(kind):
        message += f", not {_told(first['input'])}"
    code = VALIDATION_CODES.get(kind, "invalid_value")
    return ApiError(400, code, f"{param or 'body'}: {message}.", param=param)


def _told(value: Any, *, inside: bool = False) -> str:
    """Describe a given value in JSON's terms, without quoting strings."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return str(value)
        case str():
            return "a string"
        case list():
            first = f" that begins with {_told(value[0], inside=True)}" if value else ""
            return "a list" if inside else f"a list{first}"
    return "an object"


def _dotted(location: Sequence[Any]) -> str | None:
    """Return the path of a field in the request, without tags of unions (`<list>`)."""
    return ".".join(step for step in map(str, location) if STEP.fullmatch(step)) or None
