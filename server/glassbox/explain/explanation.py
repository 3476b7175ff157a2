"""Explanation: how the tokens of a past answer were drawn, computed once more by the engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.generate import Explained, GenerateRequest
from engine.protocol.outputs import TokenOutput
from server.generation.submission import Submission
from server.http.errors import numerical_error
from server.http.rate_limits import RateLimiter
from server.state import AppState
from server.telemetry.metrics import Metrics
from server.telemetry.observer import AbortReason


@dataclass(frozen=True, slots=True)
class ExplainedAnswer:
    """The tokens of an answer, and how many tokens of the request were in the prefix cache."""

    tokens: list[Explained]
    cached_tokens: int


class Explanation(Submission[TokenOutput]):
    """A Submission of one request with `explain`."""

    COUNTED = "answer_ids"

    def __init__(
        self,
        state: AppState,
        metrics: Metrics,
        request: GenerateRequest,
        limiter: RateLimiter | None = None,
    ) -> None:
        assert request.explain is not None
        self._metrics = metrics
        self._request = request
        self._num_tokens = len(request.explain.answer)
        super().__init__(state, [request.id], limiter)

    def _send(self) -> None:
        self._accept(self._client.submit([self._request]))
        if self._limiter is not None:
            self._limiter.use_tokens(self._request.size)

    async def collect(self) -> ExplainedAnswer:
        """Wait for all tokens. Raises EngineError, or ApiError if a logit is not a number."""
        request_id = self._request.id
        async for batch in self._stream:
            for at, output in batch:
                admission = self._stream.admissions.get(request_id)
                self._metrics.begin(self._request.size, self._submitted_at, admission, at)
                self._finish(request_id)
                if output.finish == "error":
                    raise numerical_error()
        found = self._stream.explained or {}
        tokens = [found[index] for index in range(self._num_tokens)]
        if any(token.drawn < 0 for token in tokens):
            raise numerical_error()
        return ExplainedAnswer(tokens, self._stream.admissions[request_id].cached_tokens)

    def _on_close(self, reason: AbortReason | None) -> None:
        if reason is not None:
            self._metrics.abort(reason)
