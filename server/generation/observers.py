"""The observers that every generation has: metrics, rate limit, access log and traces."""

from __future__ import annotations

from server.generation.prepare import PreparedRequest
from server.generation.trace import trace_of
from server.telemetry.metrics import Metrics, Stamps
from server.telemetry.observer import (
    Begun,
    Closed,
    Finished,
    GenerationObserver,
    ObserverFactory,
    Token,
)
from server.telemetry.tracing import Tracing


def spine_observers(metrics: Metrics, tracing: Tracing | None) -> list[ObserverFactory]:
    """Return the factories of the observers in this file."""
    factories: list[ObserverFactory] = [
        lambda prepared: _Measured(prepared, metrics),
        lambda prepared: None if prepared.limiter is None else _Limited(prepared),
        _Logged,
    ]
    if tracing is not None:
        factories.append(lambda prepared: _Traced(prepared, tracing))
    return factories


class _Measured(GenerationObserver):
    """Counts the tokens and times of a generation in the metrics."""

    def __init__(self, prepared: PreparedRequest, metrics: Metrics) -> None:
        self._prepared = prepared
        self._metrics = metrics

    def begun(self, begun: Begun) -> None:
        self._metrics.request_n.observe(self._prepared.options.n)

    def token(self, token: Token) -> None:
        metrics, prepared = self._metrics, self._prepared
        if not token.is_dropped:
            metrics.tokens.add_token()
        if token.last:
            metrics.tokens.add_gap(token.at - token.last)
            return
        prompt = prepared.prompt_of(token.choice)
        metrics.time_to_first_token.observe(token.at - prepared.arrival)
        metrics.request_max_tokens.observe(prepared.params[prompt].max_tokens)
        length = len(prepared.prompts[prompt])
        metrics.begin(length, token.submitted, token.admission, token.at)

    def finished(self, finished: Finished) -> None:
        record = finished.record
        assert record.finish is not None
        stamps = Stamps(
            arrival=self._prepared.arrival,
            admitted=record.first_token if record.admitted is None else record.admitted,
            first=record.first_token,
            last=record.last_token,
            ended=record.text_end,
        )
        length = record.prompt_tokens + record.num_tokens
        self._metrics.finish(
            record.finish, stamps, record.num_tokens, record.num_preemptions, length
        )
        for outcome in finished.outcomes:
            self._metrics.tool_call(outcome)

    def closed(self, closed: Closed) -> None:
        if closed.reason is not None:
            self._metrics.abort(closed.reason)


class _Limited(GenerationObserver):
    """Counts the tokens of a generation against the limits of its key."""

    def __init__(self, prepared: PreparedRequest) -> None:
        assert prepared.limiter is not None
        self._limiter = prepared.limiter
        self._prompt_tokens = sum(map(len, prepared.prompts))

    def begun(self, begun: Begun) -> None:
        self._limiter.use_tokens(self._prompt_tokens)

    def token(self, token: Token) -> None:
        if not token.is_dropped:
            self._limiter.use_tokens(1)


class _Logged(GenerationObserver):
    """Completes the request's record in the access log."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._access = prepared.access
        self._arrival = prepared.arrival

    def closed(self, closed: Closed) -> None:
        access = self._access
        access.cached_tokens = closed.cached_tokens
        access.output_tokens = sum(record.num_tokens for record in closed.records)
        first_tokens = [record.first_token for record in closed.records if record.first_token]
        if first_tokens:
            access.ttft_ms = round((min(first_tokens) - self._arrival) * 1000)
        reasons = [record.finish or closed.reason for record in closed.records]
        access.finish_reason = ",".join(dict.fromkeys(filter(None, reasons)))


class _Traced(GenerationObserver):
    """Sends the trace of a generation when it ends."""

    def __init__(self, prepared: PreparedRequest, tracing: Tracing) -> None:
        self._prepared = prepared
        self._tracing = tracing

    def closed(self, closed: Closed) -> None:
        self._tracing.record(trace_of(self._prepared, closed))
