"""Embedding: the vectors of the texts of one HTTP request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.checkpoint.sentence import SentenceConfig
from engine.protocol.embed import EmbedOutput, EmbedRequest
from server.generation.embedding_state import EmbeddingState
from server.generation.submission import Submission
from server.generation.texts import EncodedText
from server.http.errors import numerical_error
from server.http.rate_limits import RateLimiter
from server.state import AppState
from server.telemetry.observer import AbortReason

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]  # [texts, dimensions]


class Embedding(Submission[EmbedOutput]):
    """A Submission whose outputs are vectors."""

    COUNTED = "input"

    def __init__(
        self,
        state: AppState,
        embedding_state: EmbeddingState,
        texts: Sequence[EncodedText],
        arrival: float,
        priority: int,
        tenant: str = "",
        limiter: RateLimiter | None = None,
    ) -> None:
        self._arrival = arrival
        self._metrics = embedding_state.metrics
        next_id = state.client.next_id
        requests = [
            EmbedRequest(next_id(), text.ids, arrival, priority, tenant, text.skip, text.second)
            for text in texts
        ]
        self._requests = {request.id: request for request in requests}
        super().__init__(state, self._requests, limiter)

    def _send(self) -> None:
        requests = list(self._requests.values())
        self._accept(self._client.embed(requests))
        if self._limiter is not None:
            self._limiter.use_tokens(sum([request.size for request in requests]))

    async def collect(self) -> Vectors:
        """Wait for all vectors, and return them in the order of the texts.

        Raises EngineError, or ApiError if a vector is not finite.
        """
        vectors: dict[int, bytes] = {}
        async for batch in self._stream:
            for at, output in batch:
                if output.finish == "error":
                    raise numerical_error()
                self._observe(output.id, at)
                vectors[output.id] = output.vector
                self._finish(output.id)
        rows = [np.frombuffer(vectors[request_id], dtype="<f4") for request_id in self._requests]
        return np.stack(rows).astype(np.float32, copy=False)

    def _observe(self, request_id: int, at: float) -> None:
        """Record a text whose vector the engine computed at the time `at`."""
        tokens = self._requests[request_id].tokens
        admission = self._stream.admissions.get(request_id)
        self._metrics.begin(len(tokens), self._submitted_at, admission, at)
        self._metrics.embedded(self._arrival)

    def _on_close(self, reason: AbortReason | None) -> None:
        if reason is not None:
            self._metrics.abort(reason)


def finished(
    vectors: Vectors,
    sentence: SentenceConfig,
    size: int | None = None,
    normalises: bool | None = None,
) -> Vectors:
    """Return what a client gets of the vectors that the engine computes.

    Of the first `size` numbers the length is 1 if that of whole vectors is. By default vectors are
    cut as the checkpoint says, behind the normalisation, as in sentence-transformers. `normalises`
    overrides whether the length is 1.
    """
    is_unit = sentence.is_normalized if normalises is None else normalises
    if size is None:
        if sentence.is_normalized and is_unit:
            vectors = normalised(vectors)
        vectors = vectors[:, : sentence.truncate_dim]
        return normalised(vectors) if normalises else vectors
    vectors = vectors[:, :size]
    return normalised(vectors) if is_unit else vectors


def similarities(one: Vectors, other: Vectors, function: str) -> Vectors:
    """Return the similarity [N] of each pair; higher is more similar. `one` may be one for all."""
    if function == "dot":
        return np.asarray((one * other).sum(1))
    if function == "euclidean":
        return np.asarray(-np.linalg.norm(one - other, axis=1))
    if function == "manhattan":
        return np.asarray(-np.abs(one - other).sum(1))
    return np.asarray((normalised(one) * normalised(other)).sum(1))


def normalised(vectors: Vectors) -> Vectors:
    """Return the vectors at length 1. A zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return units
