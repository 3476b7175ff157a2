"""Matchers: one grammar matcher per constrained sequence, and the token masks of a step.

The masks of a step are computed on a thread while the model computes its logits. A matcher knows
how many tokens its sequence had at its state, so it can catch up with tokens of a step in flight
and go back after a preemption.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.device.limits import cpu_count
from engine.device.transfer import to_device
from engine.errors import RequestRejectedError
from engine.grammar.compiler import Compilation, GrammarCompiler
from engine.protocol import GenerateRequest
from engine.scheduling.step import SampledToken, ScheduledSlice, Step

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORD_BITS = 32
Words = npt.NDArray[np.int32]

log = logging.getLogger(__name__)


class TokenMasks(NamedTuple):
    """The allowed tokens of some of a step's sampling slices."""

    slices: list[int]  # K indices
    words: torch.Tensor  # [K, ceil(V / 32)] int32, one bit per token, the lowest bit first
    broken: frozenset[int]  # indices whose grammar cannot go on: only an end token is allowed

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `slices` and `words` on the device."""
        (rows,) = to_device([self.slices], device)
        words = self.words
        if device.type == "cuda":
            words = words.pin_memory().to(device, non_blocking=True)
        return rows, words


class LaunchedStep(Protocol):
    """A step whose tokens may not be on the host yet."""

    step: Step

    def wait(self) -> list[SampledToken]: ...


@dataclass
class _State:
    matcher: LLMatcher
    num_tokens: int  # tokens of the sequence at the matcher's state, the prompt's included
    end_token: int
    is_broken: bool = False
    assumed_from: int | None = None  # the state includes tokens of a draft, from this position on

    def move_to(self, num_tokens: int) -> None:
        """Go back to an earlier state: a preempted sequence samples its lost tokens again."""
        surplus = self.num_tokens - num_tokens
        assert surplus >= 0, "a sampled token was not accepted"
        if surplus and not self.is_broken:
            self.is_broken = not self.matcher.rollback(surplus)
        self.num_tokens = num_tokens

    def assume(self, position: int, token: int) -> None:
        """Take a token of a draft at `position`, which may turn out to be wrong."""
        if self.assumed_from is None:
            self.assumed_from = position
        self.accept(position, token)

    def forget_assumed(self, position: int) -> None:
        """Go back to the known tokens, if a draft was assumed from `position` on."""
        if self.assumed_from == position:
            self.move_to(position)
            self.assumed_from = None

    def accept(self, position: int, token: int) -> None:
        """Take the token at `position`, unless the state already includes it."""
        if position == self.num_tokens and token >= 0:
            self.num_tokens += 1
            self.is_broken = self.is_broken or not self.matcher.consume_token(token)


class Matchers:
    """The matchers of all constrained sequences of an engine."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self.compiler, self.vocab_size = compiler, vocab_size
        self._num_words = -(-vocab_size // WORD_BITS)
        self._states: dict[int, _State] = {}
        # Of past answers that are explained. They count the tokens of the answer alone.
        self._replays: dict[int, _State] = {}
        self._compiling: dict[int, tuple[GenerateRequest, Compilation]] = {}
        self._filler = ThreadPoolExecutor(1, "token-masks")
        self._executor: LLExecutor | None = None
        self._last: LaunchedStep | None = None

    # ---- requests ----------------------------------------------------------------------------

    def compile(self, request: GenerateRequest) -> None:
        """Start compiling the grammar of a request. `compiled` returns it when that is done."""
        assert request.grammar is not None
        compilation = self.compiler.submit(request.grammar)
        self._compiling[request.id] = request, compilation

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def compiled(self) -> list[tuple[GenerateRequest, RequestRejectedError | None]]:
        """Return the requests whose grammars are ready, or the reasons why they never will be."""
        done = [entry for entry in self._compiling.values() if entry[1].done()]
        results: list[tuple[GenerateRequest, RequestRejectedError | None]] = []
        for request, compilation in done:
            del self._compiling[request.id]
            try:
                matcher = compilation.result()
            except RequestRejectedError as error:
                results.append((request, error))
                continue
            assert request.grammar is not None
            end = request.grammar.end_token_ids[0]
            if request.explain is None:
                self._states[request.id] = _State(matcher, len(request.prompt), end)
            else:
                self._replays[request.id] = _State(matcher, 0, end)
            results.append((request, None))
        return results

    def wait(self) -> None:
        """Wait until a grammar is compiled."""
        wait([entry[1] for entry in self._compiling.values()], return_when=FIRST_COMPLETED)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget finished and aborted requests; unknown ids are ignored."""
        if not self._states and not self._compiling and not self._replays:
            return
        for request_id in ids:
            self._states.pop(request_id, None)
            self._replays.pop(request_id, None)
            if request_id in self._compiling:
                self._compiling.pop(request_id)[1].cancel()

    # ---- steps -------------------------------------------------------------------------------

    def start(self, sampling: Sequence[ScheduledSlice]) -> Future[TokenMasks] | None:
        """Start computing the masks of the slices that sample; None if none is constrained."""
        constrained = [index for index, s in enumerate(sampling) if s.id in self._states]
        if not constrained:
            return None
        return self._filler.submit(self._masks, sampling, constrained, self._last)

    def launched(self, pending: LaunchedStep) -> None:
        """Remember the last step: the next masks may need its tokens before it is retired."""
        self._last = pending if self._states else None

    def accept(self, step: Step, sampled: Iterable[SampledToken]) -> None:
        """Take the tokens of a step. Those that a mask already needed are known.

        Behind a drafted token that was wrong, nothing is taken.
        """
        if not self._states:
            return
        is_valid, previous = True, -1
        for s, result in zip((s for s in step.slices if s.samples), sampled, strict=True):
            is_valid = s.draft < 0 or (is_valid and s.draft == previous)
            previous = result.token
            if is_valid and (state := self._states.get(s.id)):
                if s.draft < 0:
                    state.forget_assumed(s.start + s.count)
                state.accept(s.start + s.count, result.token)

    def forced(self, request_id: int) -> list[int]:
        """Return the next tokens of a request if its grammar leaves no choice."""
        state = self._states[request_id]
        return [] if state.is_broken else state.matcher.compute_ff_tokens()

    def num_allowed(self, request_id: int, draft: Sequence[int]) -> int:
        """Return how many leading tokens of a draft a request's grammar allows."""
        state = self._states[request_id]
        return 0 if state.is_broken else state.matcher.validate_tokens(list(draft))

    def _masks(
        self,
        sampling: Sequence[ScheduledSlice],
        constrained: list[int],
        last: LaunchedStep | None,
    ) -> TokenMasks:
        if last is not None:
            self.accept(last.step, last.wait())
        words = np.zeros((len(constrained), self._num_words), np.int32)
        states: dict[int, _State] = {}
        drafted: list[tuple[int, ScheduledSlice]] = []
        for row, index in enumerate(constrained):
            s = sampling[index]
            if s.draft < 0:
                states[row] = self._states[s.id]
                states[row].move_to(s.start + s.count)
            else:
                drafted.append((row, s))
        self._fill_or_end(words, states)
        broken = {constrained[row] for row, state in states.items() if state.is_broken}
        for row, s in drafted:
            state = self._states[s.id]
            state.assume(s.start, s.draft)
            self._fill_or_end(words, {row: state})
            if state.is_broken:
                broken.add(constrained[row])
        return TokenMasks(constrained, torch.from_numpy(words), frozenset(broken))

    def replay(self, request_id: int, answer: Sequence[int], indices: range) -> torch.Tensor | None:
        """Return the allowed tokens [R, ceil(V / 32)] of R tokens of a past answer.

        None without a grammar.
        """
        state = self._replays.get(request_id)
        if state is None:
            return None
        words = np.zeros((len(indices), self._num_words), np.int32)
        for row, index in enumerate(indices):
            if state.num_tokens > index:  # explained before, until a preemption
                state.move_to(index)
            for place in range(state.num_tokens, index):
                state.accept(place, answer[place])
            self._fill_or_end(words, {row: state})
        return torch.from_numpy(words)

    def _fill_or_end(self, words: Words, states: dict[int, _State]) -> None:
        """Write the masks of states by row. Those that cannot go on allow only the end token."""
        self._fill(words, states)
        for row, state in states.items():
            if not state.is_broken and state.matcher.is_error():
                log.warning("a grammar cannot go on: %s", state.matcher.get_error().split("\n")[0])
                state.is_broken = True
            if state.is_broken:
                words[row] = 0
                words[row, state.end_token // WORD_BITS] = np.uint32(
                    1 << state.end_token % WORD_BITS
                ).view(np.int32)

    def _fill(self, words: Words, states: dict[int, _State]) -> None:
        """Write the masks of all states that are not broken, on several threads."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        whole = [(state.matcher, row) for row, state in states.items() if not state.is_broken]
        if len(whole) > 1:
            self._executor = self._executor or LLExecutor(cpu_count())
            with contextlib.suppress(Exception):
                fill_next_token_bitmask_par(self._executor, whole, words)
                return
        for matcher, row in whole:
            try:
                fill_next_token_bitmask(matcher, words, row)
            except Exception as error:
                log.warning("llguidance failed: %s", error)
                states[row].is_broken = True

    def close(self) -> None:
        self.compiler.close()
        self._filler.shutdown(wait=False, cancel_futures=True)
