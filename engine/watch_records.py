"""The records in the messages StepTrace and Blocks: what is watched, without tokens or text."""

from __future__ import annotations

from typing import Literal

from engine.message import Record

BlockEventKind = Literal["take", "pass", "preempt", "end", "find", "forget"]
WaitReason = Literal["rows", "budget", "encoder", "blocks", "prefix", "preemption", "adapter"]


class BlockEvent(Record, frozen=True):
    """One change of the requests, their block tables, or the prefix cache.

    | kind | meaning |
    |---|---|
    | take | request `id` gets `blocks` into its table of `group`, from entry `first` on; 0: none |
    | pass | a window has passed `blocks`: these entries, from `first` on, become 0 |
    | preempt | it gives back all of its blocks, and waits again |
    | end | it gives back all of its blocks, and is gone |
    | find | the prefix cache finds block `id` from now on |
    | forget | and no longer |
    """

    kind: BlockEventKind
    id: int
    group: int = 0
    first: int = 0
    blocks: tuple[int, ...] = ()


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
