"""Requests for vectors of texts, and the vectors."""

from __future__ import annotations

from engine.protocol.generate import FinishReason
from engine.protocol.message import Message, Record, TokenIds


class EmbedRequest(Message, frozen=True):
    """Encode `tokens` and pool their hidden states into one vector.

    The first `skip` tokens are a prompt that is read, but not pooled. Of a pair of texts, the other
    one begins at token `second`, and has token type 1. `priority` orders requests as in
    GenerateRequest.
    """

    id: int
    tokens: TokenIds
    arrival: float  # when the HTTP request arrived
    priority: int = 0
    tenant: str = ""
    skip: int = 0
    second: int = 0  # 0: not a pair

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of images' pixels, as of a GenerateRequest: texts have none."""
        return 0


class EmbedOutput(Record, frozen=True):
    """The vector of one text, or the logits of its labels.

    `finish` is "error" if a number is not finite.
    """

    id: int
    vector: bytes  # little-endian float32
    finish: FinishReason = "stop"
