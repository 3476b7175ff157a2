"""Generation: the choices of one HTTP request, from submission to their last events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec

from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.outputs import Admission, TokenOutput
from server.generation.choice import Choice
from server.generation.events import ChoiceEvents, PromptLogprobs, Timings, Usage
from server.generation.prepare import PreparedRequest
from server.generation.prompt_progress import ProgressReader
from server.generation.submission import Submission
from server.generation.timings import Timeline, timings_of
from server.http.errors import numerical_error
from server.state import AppState
from server.telemetry.choice_record import ChoiceRecord
from server.telemetry.observer import (
    AbortReason,
    Begun,
    Closed,
    Finished,
    GenerationObserver,
    Token,
)


class Generation(Submission[TokenOutput]):
    """A Submission whose outputs are tokens.

    Iterate over it for the events of a stream, or call `collect` for those of the whole answer.
    """

    COUNTED = "n"

    def __init__(self, state: AppState, prepared: PreparedRequest) -> None:
        self._images = prepared.images  # until they are sent
        prepared = prepared.without_pixels
        self.prepared = prepared
        self._reports_timings = state.config.enable_per_request_metrics
        self._choices = [
            Choice(state.tokenizer, prepared, index) for index in range(prepared.num_choices)
        ]
        self._by_id = {state.client.next_id(): choice for choice in self._choices}
        self._readers: dict[int, ProgressReader] = {}
        if prepared.options.prompt_progress:
            self._readers = {
                request_id: ProgressReader(len(prepared.prompts[choice.prompt]))
                for request_id, choice in self._by_id.items()
            }
        self._timelines = [Timeline() for _ in self._choices]
        self._logprob_sums = [0.0] * len(self._choices)  # of the generated tokens, if known
        made = [factory(prepared) for factory in state.observers]
        self._observers = [observer for observer in made if observer is not None]
        self._begun: list[GenerationObserver] = []
        # Only of those that override it: this runs for each token.
        self._on_token = [
            observer.token
            for observer in self._observers
            if type(observer).token is not GenerationObserver.token
        ]
        super().__init__(state, self._by_id, prepared.limiter)

    # Requests

    def _send(self) -> None:
        requests = [self._request(request_id, choice) for request_id, choice in self._by_id.items()]
        with contextlib.ExitStack() as contexts:
            for observer in self._observers:
                contexts.enter_context(observer.submission())
            self._accept(self._client.submit(requests))
            self._images = ()
            self._stream.wakes_on_prefills = bool(self._readers)
            begun = Begun(requests)
            for observer in self._observers:
                observer.begun(begun)
                self._begun.append(observer)

    def _request(self, request_id: int, choice: Choice) -> GenerateRequest:
        prepared = self.prepared
        prompt = prepared.prompts[choice.prompt]
        encoder_prompt: list[int] = []
        if prepared.start_token is not None:
            encoder_prompt = prompt
            prompt = [prepared.start_token]
        return GenerateRequest(
            id=request_id,
            prompt=prompt,
            params=self._params(choice),
            arrival=prepared.arrival,
            priority=prepared.options.priority,
            salt=prepared.salt,
            tenant=prepared.tenant,
            encoder_prompt=encoder_prompt,
            adapter=prepared.adapter,
            ablation=prepared.ablation,
            images=self._images,
        )

    def _params(self, choice: Choice) -> SamplingParams:
        prepared = self.prepared
        params = prepared.params[choice.prompt]
        # With one seed for all choices, all answers would be equal. Seeds wrap around to int64.
        seed = params.seed + choice.index - prepared.first_choice_of(choice.index)
        prompt_logprobs = -1
        if prepared.computes_prompt_logprobs(choice.index):
            prompt_logprobs = params.prompt_logprobs
        return msgspec.structs.replace(
            params,
            seed=(seed + 2**63) % 2**64 - 2**63,
            max_tokens=max(params.max_tokens, 1),  # the engine generates at least one token
            prompt_logprobs=prompt_logprobs,
        )

    # Events

    async def __aiter__(self) -> AsyncIterator[list[ChoiceEvents]]:
        """Yield the events that are ready, by choice. Raises EngineError and ApiError."""
        async for batch in self._stream:
            updates = self._with_timings([choice.take() for choice in self._consume(batch)])
            yield self._progress() + updates if self._readers else updates

    def _progress(self) -> list[ChoiceEvents]:
        """Return what is new about the prompts, if the request wants it."""
        updates = []
        for request_id, reader in self._readers.items():
            admission = self._admission(request_id)
            started = self._submitted_at if admission is None else admission.at
            if events := reader.read(self._stream.prefills[request_id], started):
                updates.append(ChoiceEvents(self._by_id[request_id].index, events))
        return updates

    async def collect(self) -> list[ChoiceEvents]:
        """Wait for the end, and return the events of each choice. Raises as iteration does."""
        async for batch in self._stream:
            self._consume(batch)
        answers = self._with_timings([choice.take() for choice in self._choices])
        return self._with_prompt_logprobs(answers)

    def _with_prompt_logprobs(self, answers: list[ChoiceEvents]) -> list[ChoiceEvents]:
        """Give each choice the prompt logprobs that were computed for the first of its prompt."""
        shared = []
        for answer in answers:
            first = answers[self.prepared.first_choice_of(answer.index)]
            events = answer.events
            if first is not answer and isinstance(first.events[0], PromptLogprobs):
                events = [first.events[0], *events]
            shared.append(replace(answer, events=events))
        return shared

    def _with_timings(self, updates: list[ChoiceEvents]) -> list[ChoiceEvents]:
        """Give the timings so far to the updates that the request wants them with."""
        options = self.prepared.options
        if not options.timings and not options.timings_per_token:
            return updates
        timings = self.timings()
        timed = []
        for update in updates:
            ends = self._choices[update.index].finish is not None
            if ends or options.timings_per_token:
                update = replace(update, timings=timings)
            timed.append(update)
        return timed

    def _consume(self, batch: list[tuple[float, TokenOutput]]) -> list[Choice]:
        """Add tokens to their choices. Return the choices that got some, by index."""
        changed: dict[int, Choice] = {}
        for at, output in batch:
            choice = self._by_id[output.id]
            if choice.finish is not None:
                continue  # sampled before the engine knew of the stop string
            timeline = self._timelines[choice.index]
            token = self._token(choice, output, at, timeline.last_token)
            for report in self._on_token:
                report(token)
            if output.finish == "error":
                raise numerical_error()
            timeline.add_token(at)
            if output.logprobs is not None:
                self._logprob_sums[choice.index] += output.logprobs.logprob
            changed[choice.index] = choice
            reason = choice.add(output, at - timeline.first_token)
            if reason is not None:
                self._end(choice, output.id)
        return [changed[index] for index in sorted(changed)]

    def usage(self) -> Usage:
        """Return the numbers of tokens so far."""
        return Usage(
            prompt_tokens=sum(map(len, self.prepared.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=self._cached_tokens(),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    def final_usage(self) -> Usage:
        """Return the numbers of tokens, with the timings if the server reports them."""
        usage = self.usage()
        if self._reports_timings:
            usage = replace(usage, timings=self.timings())
        return usage

    def timings(self) -> Timings:
        """Return where the time went so far."""
        admissions = list(self._stream.admissions.values())
        return timings_of(self._submitted_at, admissions, self._timelines, self.usage())

    def scores(self) -> list[float]:
        """Return the mean logprob of the tokens of each choice, the end token included.

        0 if the engine computes no logprobs.
        """
        lengths = [max(choice.num_tokens, 1) for choice in self._choices]
        return [total / length for total, length in zip(self._logprob_sums, lengths, strict=True)]

    def _cached_tokens(self) -> int:
        """Count the first choice of each prompt. The others share its blocks in any case."""
        admissions = self._stream.admissions
        cached = 0
        for request_id, choice in self._by_id.items():
            is_first = choice.index == self.prepared.first_choice_of(choice.index)
            if is_first and request_id in admissions:
                cached += admissions[request_id].cached_tokens
        return cached

    # Observers

    def _token(self, choice: Choice, output: TokenOutput, at: float, last: float) -> Token:
        """Return what observers learn of a token that the engine sampled at the time `at`."""
        admission = None if last else self._admission(output.id)
        return Token(
            output, choice.index, at, last, choice.drops_tokens, self._submitted_at, admission
        )

    def _end(self, choice: Choice, request_id: int) -> None:
        """Report that a choice is complete."""
        self._finish(request_id)
        self._timelines[choice.index].text_end = time.monotonic()
        finished = Finished(self._record(request_id, choice), choice.outcomes)
        for observer in self._observers:
            observer.finished(finished)

    def _admission(self, request_id: int) -> Admission | None:
        return self._stream.admissions.get(request_id)

    def _on_close(self, reason: AbortReason | None) -> None:
        records = [self._record(request_id, choice) for request_id, choice in self._by_id.items()]
        closed = Closed(records, self._cached_tokens(), reason, time.monotonic())
        with contextlib.ExitStack() as calls:  # a failure of one must not keep others from it
            for observer in reversed(self._begun):
                calls.callback(observer.closed, closed)

    def _record(self, request_id: int, choice: Choice) -> ChoiceRecord:
        timeline = self._timelines[choice.index]
        return ChoiceRecord(
            id=request_id,
            index=choice.index,
            prompt_tokens=len(self.prepared.prompts[choice.prompt]),
            num_tokens=choice.num_tokens,
            finish=choice.finish,
            submitted=self._submitted_at,
            admission=self._admission(request_id),
            prefills=self._stream.prefills[request_id],
            first_token=timeline.first_token,
            last_token=timeline.last_token,
            text_end=timeline.text_end,
        )
