"""Requests for vectors of texts, and the vectors."""

from __future__ import annotations

from typing import Literal

from engine.protocol.generate import FinishReason
from engine.protocol.message import Message, Record, TokenIds

Pooling = Literal["cls", "mean", "last"]


class EmbedRequest(Message, frozen=True):
    """Encode `tokens` and pool their hidden states into one vector.

    `priority` orders requests as in GenerateRequest.
    """

    id: int
    tokens: TokenIds
    pooling: Pooling
    arrival: float  # when the HTTP request arrived
    priority: int = 0
    tenant: str = ""

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens)


class EmbedOutput(Record, frozen=True):
    """The vector of one text; `finish` is "error" if the vector is not finite."""

    id: int
    vector: bytes  # little-endian float32
    finish: FinishReason = "stop"
