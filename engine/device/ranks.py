"""Ranks: the processes that compute one model together, each with its share of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

import torch

from engine.device.board import Board
from engine.errors import ConfigError

FLAG = "--tensor-parallel-size"
UNEVEN = "processes cannot share equally"
LOOPBACK = "127.0.0.1"
# The end of a rank is seen at once: it closes gloo's connections, and rank 0 watches the processes
# of the others. It also sees a step that stalls (engine/parallel/stall.py). Time alone proves
# nothing: a rank may wait until another has compiled a kernel.
TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a weight [out, in] of this `shape` that a rank keeps.

    `slices` are the rows of the whole weight by the checkpoint tensor that fills them, and `rows`
    those rows of each of these tensors that the rank keeps.
    """

    shape: tuple[int, int]
    slices: Mapping[str, slice]
    rows: Mapping[str, slice]
    columns: slice

    @property
    def kept_shape(self) -> tuple[int, int]:
        """The shape of what the rank keeps."""
        outputs = sum(rows.stop - rows.start for rows in self.rows.values())
        return outputs, self.columns.stop - self.columns.start


class OneShot(Protocol):
    """Small sums on GPUs in one launch: `engine/runner/rank_sums.py`."""

    def sum(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of all ranks' x, or None if it is too large."""

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return x plus the sum of all ranks' delta, and its RMS norm, or None."""


class Ranks:
    """`count` processes; this one is number `own`.

    All ranks must call the same methods in the same order, with tensors of equal shapes.
    """

    def __init__(self, own: int = 0, count: int = 1) -> None:
        self.own, self.count = own, count
        self._group: Any = None  # None: not connected
        self.store: Any = None  # where they meet
        self.board = Board()
        self.one_shot: OneShot | None = None  # None: all sums are gloo's or NCCL's
        self.connection_bytes = 0  # of a GPU's memory, that NCCL has taken
        self._sum_options: Any = None
        self._join_options: Any = None

    def connect(self, device: torch.device, place: str, board: Board | None = None) -> None:
        """Wait until all ranks have connected. `place` is an empty file that all of them can open.
        On the `board` they note what they are doing.

        On a CPU they talk over gloo, whose sockets are bound to the loopback address; on GPUs over
        NCCL.
        """
        distributed = _distributed()
        self.board = board or Board()
        self.store = store = distributed.FileStore(place, self.count)
        self._set_options()
        if device.type == "cuda":
            # NCCL's kernels run in the stream of the step, and not in one of their own.
            self._sum_options.asyncOp = self._join_options.asyncOp = False
            free = torch.cuda.mem_get_info()[0]
            chosen = distributed.ProcessGroupNCCL.Options()
            chosen._timeout = TIMEOUT
            self._group = distributed.ProcessGroupNCCL(store, self.own, self.count, chosen)
            # NCCL connects at the first use. Later, one rank may wait for minutes until another has
            # read its weights, but the store waits for five at most.
            self.numbers([self.own], device)
            self.connection_bytes = max(free - torch.cuda.mem_get_info()[0], 0)
        else:
            self._group = self._gloo(store)

    def beside(self, name: str) -> Ranks:
        """Return the same ranks with connections of their own, over gloo, for another thread.

        Wait until all ranks have called this.
        """
        others = Ranks(self.own, self.count)
        if self.count > 1:
            others._set_options()
            others._group = self._gloo(_distributed().PrefixStore(name, self.store))
        return others

    def _set_options(self) -> None:
        distributed = _distributed()
        self._sum_options = distributed.AllreduceOptions()
        self._join_options = distributed.distributed_c10d.AllgatherOptions()

    def _gloo(self, store: Any) -> Any:
        gloo = _distributed().ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        return gloo(store, self.own, self.count, options)

    # ---- shares ------------------------------------------------------------------------------

    def units(self, size: int, units: int) -> slice:
        """Return this rank's share of `size` rows or columns in `units` equal units.

        If there are fewer units than ranks, several ranks keep the same unit. Raises ConfigError if
        neither number is a multiple of the other.
        """
        if units % self.count == 0:
            share = size // self.count
            first = self.own * share
            return slice(first, first + share)
        if self.count % units:
            raise ConfigError(f"has {units} heads or other units, which {self.count} {UNEVEN}")
        unit = self.own * units // self.count
        width = size // units
        first = unit * width
        return slice(first, first + width)

    def rows(self, count: int) -> slice:
        """Return this rank's share of the rows of a table; that of the last rank may be smaller.

        Raises ConfigError if a rank would have none.
        """
        share = self.widest(count)
        if share * (self.count - 1) >= count:
            raise ConfigError(f"has only {count} rows")
        first = self.own * share
        return slice(first, min(first + share, count))

    def widest(self, count: int) -> int:
        """Return the largest share of the rows of a table."""
        return -(-count // self.count)

    # ---- collectives -------------------------------------------------------------------------

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors.

        On a CPU, and in one launch on GPUs, the bits of a row do not depend on the other rows: the
        ranks are added in their order, in fp32. NCCL chooses the order itself.
        """
        if self.one_shot is not None:
            found = self.one_shot.sum(x)
            if found is not None:
                return found
        if x.is_cuda or self.count == 2:  # two numbers have the same sum in either order
            total = x.clone()
            with self.board.waiting():
                _finish(self._group.allreduce([total], self._sum_options))
            return total
        first, *others = self._gathered(x)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors [..., n], one after the other: [..., count * n]."""
        return torch.cat(self._gathered(x), dim=-1)

    def numbers(self, own: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return each rank's `own` numbers."""
        if self.count == 1:
            return [list(own)]
        return [each.tolist() for each in self._gathered(torch.tensor(own, device=device))]

    def texts(self, own: str) -> list[str]:
        """Return each rank's `own` text, over gloo."""
        data = own.encode()
        cpu = torch.device("cpu")
        sizes = [size for (size,) in self.numbers([len(data)], cpu)]
        padded = data.ljust(max(sizes) + 1)  # gloo needs at least one number
        texts = [bytes(numbers) for numbers in self.numbers(list(padded), cpu)]
        return [text[:size].decode() for text, size in zip(texts, sizes, strict=True)]

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in their order."""
        assert self._group is not None, "the ranks are not connected"
        found = [torch.empty_like(x) for _ in range(self.count)]
        with self.board.waiting():
            _finish(self._group.allgather([found], [x.contiguous()], self._join_options))
        return found


def _finish(work: Any) -> None:
    """Wait for a collective. One that was launched in the current stream has no `work`."""
    if work is not None:
        work.wait()


def _distributed() -> Any:
    """Return torch.distributed, whose type hints leave out classes that are needed here."""
    return import_module("torch.distributed")
