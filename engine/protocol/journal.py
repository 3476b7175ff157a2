"""The scheduler's journal, which it keeps while somebody watches: ids of blocks, no text."""

from __future__ import annotations

from typing import Literal

from engine.protocol.message import Record

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
