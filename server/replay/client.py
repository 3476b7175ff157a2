"""ReplayClient: the requests of `penstock verify` to a server, over its public API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from server.sender import Sender, ServerAway

PATIENCE_S = 10.0  # that the server may be away, for a restart
Json = dict[str, Any]


class Refused(Exception):
    """The server refuses one request; the text is its message."""


@dataclass(frozen=True)
class ServedModel:
    """The model of a server, from /v1/models."""

    name: str
    kind: str
    vocab_size: int


class ReplayClient:
    """Sends requests, again if the server is busy."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._sender = Sender(http, PATIENCE_S)

    async def get(self, path: str) -> Json:
        """Return the JSON object at `path`. Raises ServerAway or Refused."""
        try:
            response = await self._http.get(path)
        except httpx2.TransportError as error:
            cause = str(error) or type(error).__name__
            raise ServerAway(f"No server answers ({cause}).") from None
        return _object(response.status_code, response.content)

    async def post(self, path: str, body: Json) -> Json:
        """Return the JSON object that answers `body`. Raises ServerAway or Refused."""
        reply = await self._sender.send(path, msgspec.json.encode(body))
        return _object(reply.status, reply.body or b"")

    async def model(self) -> ServedModel:
        """Return the served model. Raises ServerAway or Refused."""
        listed = await self.get("/v1/models")
        try:
            first = listed["data"][0]
            return ServedModel(first["id"], first["kind"], first["meta"]["n_vocab"])
        except (LookupError, TypeError):
            raise Refused("/v1/models does not answer as Penstock's does.") from None

    async def text_of(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        if not tokens:
            return ""
        answer = await self.post("/detokenize", {"tokens": tokens})
        return str(answer["prompt"])


def _object(status: int, body: bytes) -> Json:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if status == 401:
        raise Refused("The server wants another API key: set --api-key or PENSTOCK_API_KEY.")
    if not isinstance(found, dict):
        raise Refused(f"The server answers with status {status} and no JSON object.")
    if not 200 <= status < 300:
        error = found.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        raise Refused(f"The server answers with status {status}: {message}")
    return found
