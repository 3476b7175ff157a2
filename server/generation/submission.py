"""One request's life: submitted, consumed token by token, and ended exactly once.

A Generation owns its submission. Whoever makes one closes it in a `finally`; closing aborts what
still runs, whichever way the request ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import msgspec
from sse_starlette.sse import SendTimeoutError

from engine.errors import EngineError, RequestRejectedError
from engine.protocol import GenerateRequest, TokenLogprobs, TokenOutput
from server.api.openai.schemas.chat import ChatBody
from server.generation.prepare import PreparedRequest
from server.http.errors import ApiError, ClientGone, numerical_error
from server.state import AppState
from server.telemetry.metrics import AbortReason, Stamps
from server.telemetry.tracing import Attributes, Phase, Trace
from server.text.detokenizer import Detokenizer
from server.text.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenWithLogprobs:
    """A token of the text with its log-probabilities; `offset` counts characters before it."""

    token: int
    logprobs: TokenLogprobs | None  # None: the prompt's first, of which there are none
    offset: int


@dataclass(slots=True)
class Delta:
    """What has come for one choice since it was last taken."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[TokenWithLogprobs] = field(default_factory=list)
    prompt: tuple[TokenLogprobs, ...] | None = None  # where asked for, with the first token


class Choice:
    """One sequence of a request while it grows."""

    def __init__(self, state: AppState, plan: PreparedRequest, index: int) -> None:
        body = plan.body
        self.index = index
        self.prompt = index // plan.n
        self.finish: str | None = None
        self.count = 0  # tokens generated, the end token included
        self.first_at = self.last_at = 0.0
        self.ended_at = 0.0  # by the API process's clock: its text is complete
        echo = plan.echoes[self.prompt].text if plan.echoes else ""
        self._delta = Delta(text=echo)
        self._length = len(echo)  # characters decoded so far
        self._wants_scores = body.num_prompt_logprobs >= 0
        self._silent = plan.params[self.prompt].max_tokens == 0
        self._min_tokens = body.min_tokens or 0
        self._shows_end = bool(body.include_stop_str_in_output)
        self._detokenizer = Detokenizer(
            state.tokenizer,
            skip_special_tokens=body.skip_special_tokens is not False,
            continues=plan.start_token is None,
        )
        self._matcher = StopMatcher(body.stops, include=self._shows_end)

    def add(self, at: float, output: TokenOutput) -> str | None:
        """Returns the finish reason, if any; raises ApiError where the numbers broke down."""
        if output.finish == "error":
            raise numerical_error()
        if self._wants_scores and not self.first_at:
            self._delta.prompt = output.prompt_logprobs
        self.count += not self._silent
        self.first_at, self.last_at = self.first_at or at, at
        if self._silent:
            self.finish = "length"
            return self.finish
        self._delta.token_ids.append(output.token)
        # The engine ends with "stop" only on an end token, which is no part of the text.
        if output.finish != "stop" or self._shows_end:
            if output.logprobs is not None:
                scored = TokenWithLogprobs(output.token, output.logprobs, self._length)
                self._delta.scored.append(scored)
            self._show(self._detokenizer.push((output.token,)))
        if output.finish is not None and self.finish is None:
            self._show(self._detokenizer.flush())
            if self.finish is None:
                self.finish = output.finish
                self._delta.text += self._matcher.flush()
        return self.finish

    def _show(self, text: str) -> None:
        self._length += len(text)
        # As in vLLM, a stop string counts where it ends after the text of min_tokens tokens.
        text, hit = self._matcher.push(text, too_early=self.count <= self._min_tokens)
        self.finish = "stop" if hit is not None else None
        self._delta.text += text

    def take(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta


class Generation:
    """The sequences of one HTTP request; raises as EngineClient.submit where there is no room."""

    def __init__(self, state: AppState, plan: PreparedRequest) -> None:
        self.plan = plan
        self._metrics, self._client = state.metrics, state.client
        self._tracing = state.tracing
        self.choices = [Choice(state, plan, i) for i in range(len(plan.prompts) * plan.n)]
        self._by_id = {self._client.next_id(): choice for choice in self.choices}
        self._submitted = time.monotonic()
        self._stream = self._client.submit(
            [self._request(i, choice) for i, choice in self._by_id.items()]
        )
        self._closed = False

    def _request(self, request_id: int, choice: Choice) -> GenerateRequest:
        plan = self.plan
        prompt, params = plan.prompts[choice.prompt], plan.params[choice.prompt]
        scores = plan.body.stream or choice.index % plan.n == 0
        # Different seeds for the choices, wrapped to int64, or n answers would be one.
        seed = (params.seed + choice.index % plan.n + 2**63) % 2**64 - 2**63
        return GenerateRequest(
            id=request_id,
            prompt=prompt if plan.start_token is None else [plan.start_token],
            params=msgspec.structs.replace(
                params,
                seed=seed,
                # Where none are wanted one is drawn all the same, and kept back.
                max_tokens=max(params.max_tokens, 1),
                # Of each prompt once, where nobody waits for the first tokens of a choice.
                prompt_logprobs=params.prompt_logprobs if scores else -1,
            ),
            arrival=plan.arrival,
            priority=plan.body.priority or 0,
            salt=plan.salt,
            encoder_prompt=[] if plan.start_token is None else prompt,
        )

    async def begin(self, limit: float) -> None:
        """Waits up to `limit` seconds for the first tokens, while errors still have a status."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._stream.arrival()

    async def __aiter__(self) -> AsyncIterator[list[Choice]]:
        """After each turn, the choices that got tokens. Raises EngineError and ApiError."""
        async for batch in self._stream:
            yield self._consume(batch)

    async def collect(self) -> list[Delta]:
        """Everything, when it is complete; one Delta for each choice."""
        async for _ in self:
            pass
        deltas = [choice.take() for choice in self.choices]
        for choice, delta in zip(self.choices, deltas, strict=True):
            delta.prompt = deltas[choice.prompt * self.plan.n].prompt
        return deltas

    def _consume(self, batch: list[tuple[float, TokenOutput]]) -> list[Choice]:
        touched: dict[int, Choice] = {}
        for at, output in batch:
            choice = self._by_id[output.id]
            if choice.finish is not None:
                continue  # sampled before the engine heard of the stop string
            self._observe(choice, at, output.id)
            touched[choice.index] = choice
            if finish := choice.add(at, output):
                self._end(choice, output.id, finish)
        return [touched[index] for index in sorted(touched)]

    def _observe(self, choice: Choice, at: float, request_id: int) -> None:
        metrics = self._metrics
        metrics.generation_tokens.inc(self.plan.params[choice.prompt].max_tokens > 0)
        if choice.count:
            metrics.inter_token_latency.observe(at - choice.last_at)
            return
        metrics.time_to_first_token.observe(at - self.plan.arrival)
        metrics.request_max_tokens.observe(self.plan.params[choice.prompt].max_tokens)
        tokens, admission = (
            self.plan.prompts[choice.prompt],
            self._stream.admissions.get(request_id),
        )
        metrics.begin(len(tokens), self._submitted, admission, at)

    def _end(self, choice: Choice, request_id: int, finish: str) -> None:
        self._stream.finish(request_id)
        choice.ended_at = time.monotonic()
        self._metrics.finish(finish, self._stamps(choice, request_id), choice.count)

    def _stamps(self, choice: Choice, request_id: int) -> Stamps:
        admission = self._stream.admissions.get(request_id)
        return Stamps(
            arrival=self.plan.arrival,
            admitted=admission.at if admission else choice.first_at,
            first=choice.first_at,
            last=choice.last_at,
            ended=choice.ended_at,
        )

    def usage(self) -> dict[str, object]:
        prompt = sum(map(len, self.plan.prompts))
        completion = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def _cached_tokens(self) -> int:
        """Of the first choice of each prompt: the others share its blocks anyway."""
        admissions = self._stream.admissions
        firsts = [i for i, choice in self._by_id.items() if choice.index % self.plan.n == 0]
        return sum(admissions[i].cached_tokens for i in firsts if i in admissions)

    def close(self, error: BaseException | None = None) -> None:
        """Aborts what is unfinished and counts it under what `error` means. Idempotent."""
        if self._closed:
            return
        self._closed = True
        reason = None
        if any(choice.finish is None for choice in self.choices):
            reason = abort_reason(error, draining=self._client.state == "draining")
            self._metrics.abort(reason)
        self._stream.close()
        if self._tracing:
            self._tracing.record(self._trace(reason))

    def _trace(self, error: str | None) -> Trace:
        """What has become of the request, from the stamps the metrics got."""
        body, end = self.plan.body, time.monotonic()
        operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": self.plan.model,
            "gen_ai.response.model": self.plan.model,
            "gen_ai.request.choice.count": len(self.choices),
            "gen_ai.request.max_tokens": self.plan.params[0].max_tokens,
            "gen_ai.request.temperature": self.plan.params[0].temperature,
            "gen_ai.request.top_p": self.plan.params[0].top_p,
            "gen_ai.usage.input_tokens": sum(map(len, self.plan.prompts)),
            "gen_ai.usage.output_tokens": sum(choice.count for choice in self.choices),
            "gen_ai.usage.cache_read.input_tokens": self._cached_tokens(),
            "gen_ai.response.finish_reasons": [c.finish for c in self.choices if c.finish],
            "penstock.request_id": self.plan.request_id,
        }
        whole = Phase(f"{operation} {self.plan.model}", self.plan.arrival, end, attributes)
        phases = [phase for i in self._by_id for phase in self._phases(i, end)]
        return Trace(whole, phases, self.plan.headers, error)

    def _phases(self, request_id: int, end: float) -> Iterator[Phase]:
        """The parts of one choice's time, as far as it came."""
        choice, admission = self._by_id[request_id], self._stream.admissions.get(request_id)
        which = {"penstock.choice": choice.index}
        yield Phase("queue", self._submitted, admission.at if admission else end, which)
        for start, done, chunk in self._stream.prefills[request_id]:
            tokens = {"penstock.start": chunk.start, "penstock.tokens": chunk.count}
            yield Phase("prefill", start, done, which | tokens)
        if choice.count:
            tokens = {"penstock.tokens": choice.count}
            yield Phase("decode", choice.first_at, choice.last_at, which | tokens)
            yield Phase("detokenise", choice.last_at, choice.ended_at or end, which)


def abort_reason(error: BaseException | None, *, draining: bool) -> AbortReason:
    """What ended a request before its work was done."""
    match error:
        case SendTimeoutError():
            return "send_timeout"
        case RequestRejectedError():
            return "rejected"
        case EngineError():
            return "shutdown" if draining else "engine"
        case ApiError():
            return "numerical"
        case None | ClientGone() | asyncio.CancelledError():
            return "disconnect"
    return "internal"
