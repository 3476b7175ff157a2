"""Messages about watching the engine. They hold integers and times, no token and no text.

While somebody watches, the engine sends a StepTrace behind each StepOutputs. Watch begins and ends
this.
"""

from __future__ import annotations

from msgspec import field

from engine.protocol.journal import BlockEvent, WaitReason
from engine.protocol.message import Message, Record
from engine.protocol.outputs import EngineStats, PrefillChunk


class RequestState(Record, frozen=True):
    """A request that generates, as the scheduler has it. It runs if it has tables."""

    id: int
    arrival: float
    priority: int
    prompt_tokens: int
    cached_tokens: int = 0  # as in its Admission
    generated_tokens: int = 0  # as many as StepOutputs have been sent
    is_preempted: bool = False  # it ran before, and waits again
    tables: tuple[tuple[int, ...], ...] = ()  # blocks by KV group; 0: an entry without block


class QueueState(Record, frozen=True):
    """The first waiting requests, and why the scheduler did not admit the first one.

    | reason | meaning |
    |---|---|
    | rows | `--max-num-seqs` requests are running |
    | budget | running requests use the step's token budget |
    | encoder | other encoder prompts use the step's budget for them |
    | blocks | it needs `needed` KV blocks; `available` are free or only cached |
    | prefix | it waits to reuse the block that request `sharing` computes now |
    | preemption | a request was preempted in this step, so none is admitted |

    With "rows", "budget" and "preemption" this is why the others wait, too. Otherwise they wait
    behind the first one.
    """

    ids: tuple[int, ...] = ()
    reason: WaitReason = "budget"
    needed: int = 0
    available: int = 0
    sharing: int = 0


class Watch(Message, frozen=True):
    """Begin to watch the engine, or stop.

    The engine answers each Watch that is `on` with a Blocks, and then sends StepTraces. Before that
    Blocks come the events up to it, so that it checks what was rebuilt from earlier events.
    """

    id: int  # from the same numbers as those of requests
    on: bool


class MeasureWaits(Message, frozen=True):
    """Begin to measure how long the engine's threads wait for a core, or stop.

    While it is `on`, the engine sends a StepWaits behind each StepOutputs of a step.
    """

    on: bool
    # Waits of the engine's main thread, in its life, when this was sent; -1: not known.
    waited_ns: int = -1


class StepWaits(Message, frozen=True):
    """The time in which threads of the engine were ready to run and had no core.

    A step took longer by `longest` at least and by `total` at most: threads may wait at the same
    time. All are 0 where the system does not count.
    """

    step: int  # as in EngineStats
    idle: float  # seconds between the step before and the arrival of the last request
    longest: float  # seconds, of the computing thread that has waited longest
    total: float  # seconds, of all computing threads


class StepTrace(Message, frozen=True):
    """Events in the engine since the last StepTrace, up to the StepOutputs before it."""

    step: int  # as in EngineStats
    launched: float  # 0.0: there was no step
    at: float  # as in StepOutputs
    chunks: list[PrefillChunk]
    decodes: list[int]  # requests that decoded a token
    encoded: list[PrefillChunk]  # sources and texts that were encoded
    added: list[RequestState]  # requests that have arrived, before all of the events
    events: list[BlockEvent]  # in the order in which they happened
    queue: QueueState
    blocks_held: int  # after these events, as the next
    blocks_cached: int
    # Begin and end of each piece of a lens that was computed between steps.
    lenses: list[tuple[float, float]] = field(default_factory=list)


class Blocks(Message, frozen=True):
    """All requests that generate, their block tables, and what the prefix cache finds."""

    id: int  # of the Watch that it answers
    requests: list[RequestState]
    findable: list[int]  # blocks, held or not
    queue: QueueState
    stats: EngineStats
