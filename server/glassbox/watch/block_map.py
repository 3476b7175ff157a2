"""BlockMap: the engine's requests and block tables, rebuilt from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.protocol.journal import BlockEvent
from engine.protocol.outputs import StepOutputs
from engine.protocol.watch import Blocks, RequestState, StepTrace

ABORTED = "aborted"  # the end of a request without a last token


@dataclass(slots=True)
class WatchedRequest:
    """A request that generates. `state` is waiting, running, preempted, or why it has ended."""

    id: int
    arrival: float  # CLOCK_MONOTONIC seconds
    priority: int
    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    state: str = "waiting"
    tables: dict[int, list[int]] = field(default_factory=dict)  # by KV group, without empty ones

    @property
    def num_blocks(self) -> int:
        return sum(sum(map(bool, table)) for table in self.tables.values())


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request as viewers see it after a change."""

    id: int
    state: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    priority: int
    arrival: float


class BlockMap:
    """The requests by their ids, and the blocks that the prefix cache finds."""

    def __init__(self, blocks: Blocks) -> None:
        self.requests = {state.id: _from_state(state) for state in blocks.requests}
        self.findable = set(blocks.findable)

    def apply(self, trace: StepTrace, outputs: Sequence[StepOutputs]) -> Mapping[int, RequestRow]:
        """Apply what happened in a step; `outputs` came before the trace.

        Return the requests that changed by more than a decoded token. One with accepted drafts has
        several tokens of a step.
        """
        changed = {chunk.id for chunk in trace.chunks}
        for state in trace.added:
            self.requests[state.id] = _from_state(state)
            changed.add(state.id)
        finishes: dict[int, str] = {}
        tokens: Counter[int] = Counter()
        for output in outputs:
            changed |= self._take_outputs(output, tokens, finishes)
        changed |= {key for key in {*tokens, *trace.decodes} if tokens[key] != 1}
        ended: dict[int, RequestRow] = {}
        for event in trace.events:
            match event.kind:
                case "find":
                    self.findable.add(event.id)
                case "forget":
                    self.findable.discard(event.id)
                case _:
                    request = self.requests.get(event.id)
                    if request is not None and self._change(request, event):
                        changed.add(event.id)
            if event.kind == "end" and event.id in self.requests:
                request = self.requests.pop(event.id)
                request.state = finishes.get(event.id, ABORTED)
                ended[event.id] = row_of(request)
        live = {key: row_of(self.requests[key]) for key in changed if key in self.requests}
        return live | ended

    def _take_outputs(
        self, outputs: StepOutputs, tokens: Counter[int], finishes: dict[int, str]
    ) -> set[int]:
        """Count the tokens of a step by request; return the ids of requests that it admitted."""
        for admission in outputs.admitted:
            if admission.id in self.requests:
                self.requests[admission.id].cached_tokens = admission.cached_tokens
        for output in outputs.tokens:
            if output.id in self.requests and output.token >= 0:
                self.requests[output.id].generated_tokens += 1
                tokens[output.id] += 1
            if output.finish is not None:
                finishes[output.id] = output.finish
        return {admission.id for admission in outputs.admitted}

    def _change(self, request: WatchedRequest, event: BlockEvent) -> bool:
        """Apply an event to a request; return whether its state changes."""
        before = request.state
        match event.kind:
            case "take":
                table = request.tables.setdefault(event.group, [])
                assert len(table) == event.first, "a table has a gap"
                table += event.blocks
                request.state = "running"
            case "pass":
                table = request.tables[event.group]
                end = event.first + len(event.blocks)
                table[event.first : end] = [0] * len(event.blocks)
            case "preempt":
                request.tables = {}
                request.state = "preempted"
        return request.state != before

    def equals(self, other: BlockMap) -> bool:
        return self.requests == other.requests and self.findable == other.findable


def _from_state(state: RequestState) -> WatchedRequest:
    request = WatchedRequest(
        state.id,
        state.arrival,
        state.priority,
        state.prompt_tokens,
        state.cached_tokens,
        state.generated_tokens,
    )
    request.tables = {group: list(table) for group, table in enumerate(state.tables) if table}
    if request.tables:
        request.state = "running"
    elif state.is_preempted:
        request.state = "preempted"
    return request


def row_of(request: WatchedRequest) -> RequestRow:
    return RequestRow(
        request.id,
        request.state,
        request.prompt_tokens,
        request.cached_tokens,
        request.generated_tokens,
        request.priority,
        request.arrival,
    )
