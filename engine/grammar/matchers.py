"""Matchers: the grammars of constrained sequences, and the token masks of a step.

A process of its own follows each grammar (see engine/grammar/process.py). It computes the next mask
as soon as the engine knows a token. A sequence whose mask is missing sits out the step, so that
nothing waits for a slow grammar. With overlap, the mask behind a token that is still in flight is
requested once the token arrives, while the device computes the step that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import RequestRejectedError
from engine.grammar.answers import FollowedAnswer, ReplayedAnswer
from engine.grammar.compiler import GrammarCompiler
from engine.protocol.generate import GenerateRequest
from engine.sampling.masks import LaunchedStep, LazyMasks, TokenMasks
from engine.scheduling.step import SampledToken, ScheduledSlice, Step

WORD_BITS = 32
Words = npt.NDArray[np.int32]

WAIT_S = 0.005  # of an engine without other work, for the message of a grammar
STEP_WAIT_S = 0.005  # of a step, for masks that are usually quick


class Matchers:
    """The matchers of all constrained sequences of an engine."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self.compiler, self.vocab_size = compiler, vocab_size
        self._num_words = -(-vocab_size // WORD_BITS)
        self._states: dict[int, FollowedAnswer] = {}
        self._replays: dict[int, ReplayedAnswer] = {}
        self._compiling: dict[int, FollowedAnswer] = {}
        self._last: LaunchedStep | None = None
        self._wait_left = STEP_WAIT_S

    # ---- requests ----------------------------------------------------------------------------

    def compile(self, request: GenerateRequest) -> None:
        """Start compiling the grammar of a request. `compiled` returns it when that is done."""
        assert request.grammar is not None
        process = self.compiler.open(request.tenant, request.grammar, request.id)
        kind = FollowedAnswer if request.explain is None else ReplayedAnswer
        self._compiling[request.id] = kind(request, process)

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def compiled(self) -> list[tuple[GenerateRequest, RequestRejectedError | None]]:
        """Return the requests whose grammars are ready, or why a request cannot be answered.

        The latter includes requests that were ready before: a grammar may go over a limit later.
        """
        self._wait_left = STEP_WAIT_S
        self._poll()
        results: list[tuple[GenerateRequest, RequestRejectedError | None]] = []
        for state in [*self._compiling.values(), *self._states.values(), *self._replays.values()]:
            request, error = state.request, state.refusal
            if error is None:
                if state.allowed is None or request.id not in self._compiling:
                    continue
                del self._compiling[request.id]
                if isinstance(state, ReplayedAnswer):
                    self._replays[request.id] = state
                else:
                    self._states[request.id] = state
            else:
                self.drop([request.id])
            results.append((request, error))
        return results

    @property
    def is_waiting(self) -> bool:
        """Whether a process computes what a running sequence needs."""
        states = [*self._states.values(), *self._replays.values()]
        return any(state.allowed is None for state in states)

    def wait(self) -> None:
        """Wait a moment for a process."""
        self._poll(WAIT_S)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget finished and aborted requests; unknown ids are ignored."""
        if not self._states and not self._compiling and not self._replays:
            return
        for request_id in ids:
            for states in (self._states, self._replays, self._compiling):
                state = states.pop(request_id, None)
                if state is not None:
                    self.compiler.close_answer(state.process, request_id)

    # ---- steps -------------------------------------------------------------------------------

    def is_ready(self, request_id: int, num_tokens: int) -> bool:
        """Return whether a sequence may be in the next step; its tokens in flight count.

        Otherwise it sits out the step. A usual grammar has its mask by now, or in a moment.
        """
        state = self._states.get(request_id) or self._replays.get(request_id)
        if state is None:
            return True
        if state.process.is_late and not state.knows(num_tokens):
            return False  # the mask behind the token in flight will take long
        self._await(state, lambda: state.allowed is not None)
        return state.allowed is not None and state.refusal is None

    def start(self, sampling: Sequence[ScheduledSlice]) -> LazyMasks | None:
        """Return the masks of the slices that sample; None if none is constrained."""
        constrained = [index for index, s in enumerate(sampling) if s.id in self._states]
        if not constrained:
            return None
        return LazyMasks(lambda: self._masks(sampling, constrained))

    def launched(self, pending: LaunchedStep) -> None:
        """Remember the last step: the next masks may need its tokens before it is retired."""
        self._last = pending if self._states else None

    def accept(self, step: Step, sampled: Iterable[SampledToken]) -> None:
        """Take the tokens of a step, and have the next masks computed.

        Behind a drafted token that was wrong, nothing is taken.
        """
        if self._last is not None and self._last.step is step:
            self._last = None
        if not self._states:
            return
        is_valid, previous = True, -1
        changed: dict[int, FollowedAnswer] = {}
        for s, result in zip((s for s in step.slices if s.samples), sampled, strict=True):
            is_valid = s.draft < 0 or (is_valid and s.draft == previous)
            previous = result.token
            if is_valid and (state := self._states.get(s.id)):
                state.accept(s.start + s.count, result.token)
                changed[s.id] = state
        for state in changed.values():
            state.sync()

    def forced(self, request_id: int) -> list[int]:
        """Return the next tokens of a request if its grammar leaves no choice."""
        allowed = self._states[request_id].allowed
        return [] if allowed is None else allowed.forced

    def num_allowed(self, request_id: int, draft: Sequence[int]) -> int:
        """Return how many leading tokens of a draft a request's grammar allows.

        0 if its process does not answer in a moment.
        """
        state = self._states[request_id]
        if state.allowed is None or state.process.is_late:
            return 0
        state.try_draft(list(draft))
        self._await(state, lambda: not state.is_trying)
        state.give_up_draft()
        return len(state.draft_masks)

    def _masks(self, sampling: Sequence[ScheduledSlice], constrained: list[int]) -> TokenMasks:
        if self._last is not None:
            self.accept(self._last.step, self._last.wait())
        words = np.full((len(constrained), self._num_words), -1, np.int32)
        broken: set[int] = set()
        for index in constrained:
            s = sampling[index]
            if s.draft < 0:
                self._states[s.id].move_to(s.start + s.count)
                self._states[s.id].sync()
        for row, index in enumerate(constrained):
            s = sampling[index]
            state = self._states[s.id]
            if s.draft < 0:
                self._await_answer(state)
                mask = state.mask
                if not mask:
                    broken.add(index)
            else:
                mask = state.draft_masks[s.start - state.num_tokens]
            words[row] = self._row(mask, state)
        return TokenMasks(constrained, torch.from_numpy(words), frozenset(broken))

    def replay(self, request_id: int, answer: Sequence[int], indices: range) -> torch.Tensor | None:
        """Return the allowed tokens [R, ceil(V / 32)] of R tokens of a past answer.

        None without a grammar.
        """
        state = self._replays.get(request_id)
        if state is None:
            return None
        if not state.covers(indices):  # explained before, until a preemption
            state.request_masks(indices.start)
        self._await_answer(state)
        rows = [self._row(state.mask_before(index), state) for index in indices]
        state.request_masks(indices.stop)
        return torch.from_numpy(np.stack(rows))

    def _row(self, mask: bytes, state: FollowedAnswer) -> Words:
        """Return the words of a mask. A grammar that cannot go on allows only the end token."""
        if mask:
            return np.frombuffer(mask, np.int32)[: self._num_words]
        words = np.zeros(self._num_words, np.int32)
        assert state.request.grammar is not None
        end = state.request.grammar.end_token_ids[0]
        words[end // WORD_BITS] = np.uint32(1 << end % WORD_BITS).view(np.int32)
        return words

    # ---- messages ----------------------------------------------------------------------------

    def _poll(self, timeout: float = 0.0) -> None:
        self.compiler.poll(timeout)
        received, self.compiler.allowed = self.compiler.allowed, []
        for message in received:
            request_id = message.answer
            for states in (self._states, self._replays, self._compiling):
                if state := states.get(request_id):
                    state.take(message)

    def _await(self, state: FollowedAnswer, is_done: Callable[[], bool]) -> None:
        """Wait for a message about a state, for as long as steps may wait for its process."""
        if is_done():
            return
        self._poll()
        now = time.monotonic()
        end = now + max(0.0, min(state.process.credit, self._wait_left))
        while not is_done() and state.refusal is None:
            waited, now = now, time.monotonic()
            state.process.wait(now - waited)
            self._wait_left -= now - waited
            if now >= end:
                return
            self._poll(end - now)

    def _await_answer(self, state: FollowedAnswer) -> None:
        """Wait for the mask behind the last token of a state, which the launched step needs."""
        begin = time.monotonic()
        while state.allowed is None and state.refusal is None:
            self._poll(WAIT_S)
        state.process.wait(time.monotonic() - begin)

    def close(self) -> None:
        self.compiler.close()
