"""Low-rank adapters of one linear layer, several in memory at once (see `engine/ops/lora.py`).

On a CPU each adapter is packed as weights are, so that the bits of a token do not depend on the
other tokens. With Numba's kernel all adapters of a step are multiplied at once, as experts are.
Elsewhere the adapters lie in one tensor, so that a captured step reads any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from engine.device.ranks import Shard
from engine.layers.weights.onednn import PackedWeight
from engine.layers.weights.weight import Weight
from engine.ops.experts import ExpertRows, rows_by_expert
from engine.ops.kernels import Kernels
from engine.ops.lora import AdapterGroup, Parts, TokenAdapters, add_lora

if TYPE_CHECKING:
    from engine.kernels.numba.linear import PackedMultiply

# By part of the layer: A [rank, in] and B [out of the part, rank], fp32, B times the scale.
# This rank is that of the two matrices. The processes that share a model are called ranks, too.
LowRankParts = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class SortedTokens(NamedTuple):
    """The tokens of a batch by slot, those of slot 0 first."""

    rows: ExpertRows
    indices: torch.Tensor  # [T]: the row of each token


class Tokens:
    """The adapters of the tokens that a model computes now. All layers share one object."""

    def __init__(self) -> None:
        self._current: TokenAdapters | None = None
        self._sorted: SortedTokens | None = None

    @property
    def current(self) -> TokenAdapters | None:
        """None if no token has an adapter."""
        return self._current

    @current.setter
    def current(self, value: TokenAdapters | None) -> None:
        self._current = value
        self._sorted = None

    def by_slot(self, num_slots: int) -> SortedTokens:
        """Return the current tokens by slot. The layers of a step sort them once."""
        assert self._current is not None
        if self._sorted is None:
            slots = self._current.slots.long()
            rows = rows_by_expert(slots[:, None], num_slots + 1)
            self._sorted = SortedTokens(rows, rows.pairs.argsort())
        return self._sorted


class LinearAdapters(Protocol):
    """The adapters of one layer, by slot."""

    def prepare(self, given: LowRankParts) -> Any:
        """Return what `write` takes. It may run in another thread than all other methods."""

    def write(self, slot: int, prepared: Any) -> None:
        """Set the adapter of a slot; None clears it."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y [T, out] plus what the tokens' adapters make of x [T, in]. May write to y."""

    @property
    def takes_groups(self) -> bool:
        """Whether it reads `TokenAdapters.groups`, which differ in every step."""

    @property
    def nbytes(self) -> int:
        """Bytes that are taken whether or not a slot is filled."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The shape of a layer, and the dtype and device of its outputs.

    If ranks divide the layer, the shape is that of this rank's `shard`.
    """

    inputs: int
    outputs: int
    slices: Mapping[str, slice]  # of the output rows, by part
    dtype: torch.dtype
    device: torch.device
    shard: Shard | None = None  # None: the whole layer

    @property
    def whole(self) -> tuple[int, int]:
        """The outputs and inputs of the layer in all ranks together."""
        return (self.outputs, self.inputs) if self.shard is None else self.shard.shape

    @property
    def whole_slices(self) -> Mapping[str, slice]:
        """The output rows of each part in all ranks together."""
        return self.slices if self.shard is None else self.shard.slices

    def shard_of(self, given: LowRankParts) -> LowRankParts:
        """Return the columns of A and the rows of B that this rank computes with."""
        shard = self.shard
        if shard is None:
            return given
        return {part: (a[:, shard.columns], b[shard.rows[part]]) for part, (a, b) in given.items()}


def shape_of(weight: Weight, dtype: torch.dtype, device: torch.device) -> LinearShape:
    """Return the shape of a layer whose weight is not packed yet."""
    outputs, inputs = weight.plain.shape
    return LinearShape(inputs, outputs, weight.slices, dtype, device, weight.shard)


Matmul = TypeVar("Matmul")


class Pair(NamedTuple, Generic[Matmul]):
    """The two matmuls of one adapter."""

    down: Matmul  # [width, in]; the width is the sum of the parts' ranks
    up: Matmul  # [out, width]; zero where a part does not use another part's


def _joined(
    given: LowRankParts, shape: LinearShape, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's A [width, in] and B [out, width], with zeros for other parts."""
    options: dict[str, Any] = {"dtype": shape.dtype}
    down = torch.zeros(width, shape.inputs, **options)
    up = torch.zeros(shape.outputs, width, **options)
    first = 0
    for part, (a, b) in shape.shard_of(given).items():
        rows = slice(first, first + len(a))
        down[rows] = a
        up[shape.slices[part], rows] = b
        first += len(a)
    return down, up


class PackedAdapters:
    """Adapters as pairs of packed weights, which are multiplied one after the other."""

    nbytes = 0
    takes_groups = True

    def __init__(self, shape: LinearShape, tokens: Tokens, num_slots: int) -> None:
        self._shape = shape
        self._tokens = tokens
        self._pairs: list[Pair[PackedWeight] | None] = [None] * (num_slots + 1)

    def prepare(self, given: LowRankParts) -> Pair[PackedWeight] | None:
        if not given:
            return None
        width = sum(len(a) for a, _ in given.values())
        down, up = _joined(given, self._shape, width)
        return Pair(PackedWeight(down), PackedWeight(up))

    def write(self, slot: int, prepared: Pair[PackedWeight] | None) -> None:
        self._pairs[slot] = prepared

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._tokens.current is not None:
            for group in self._tokens.current.groups:
                pair = self._pairs[group.slot]
                if pair is not None:
                    y = _added(x, y, group, pair)
        return y


def _added(
    x: torch.Tensor, y: torch.Tensor, group: AdapterGroup, pair: Pair[PackedWeight]
) -> torch.Tensor:
    if group.tokens is None:
        return y.add_(pair.up(pair.down(x)))
    selected = x.index_select(0, group.tokens)
    added = pair.up(pair.down(selected))[: group.count]
    return y.index_add_(0, group.tokens[: group.count], added)


class PanelAdapters:
    """Adapters whose matmuls Numba's kernel computes together, for all tokens of a step.

    A slot without an adapter has layers without inputs, whose products are zeros.
    """

    nbytes = 0
    takes_groups = False

    def __init__(self, shape: LinearShape, tokens: Tokens, num_slots: int, rank: int) -> None:
        from engine.kernels.numba.experts import ExpertsMultiply
        from engine.kernels.numba.linear import narrow

        self._shape = shape
        self._tokens = tokens
        self._num_slots = num_slots
        widest = self._width(len(shape.slices) * rank)
        self._none = Pair(
            *(narrow(torch.empty(n, 0, dtype=shape.dtype)) for n in (widest, shape.outputs))
        )
        self._downs, self._ups = (ExpertsMultiply([each] * (num_slots + 1)) for each in self._none)

    @staticmethod
    def can_compute(shape: LinearShape, kernels: Kernels) -> bool:
        """Return whether the kernel takes a layer of this shape, on this CPU."""
        if kernels != "numba":
            return False
        from engine.kernels.numba.linear import PANEL, has_kernel

        return has_kernel(shape.dtype) and shape.outputs % PANEL == 0 and shape.inputs % 2 == 0

    def _width(self, ranks: int) -> int:
        from engine.kernels.numba.linear import PANEL

        return -(-ranks // PANEL) * PANEL

    def prepare(self, given: LowRankParts) -> Pair[PackedMultiply] | None:
        """It runs no kernel of ours: one of another thread would be recorded with a step."""
        from engine.kernels.numba.linear import narrow

        if not given:
            return None
        width = self._width(sum(len(a) for a, _ in given.values()))
        down, up = _joined(given, self._shape, width)
        return Pair(narrow(down), narrow(up))

    def write(self, slot: int, prepared: Pair[PackedMultiply] | None) -> None:
        down, up = prepared or self._none
        self._downs.put(slot, down)
        self._ups.put(slot, up)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._tokens.current is None:
            return y
        rows, indices = self._tokens.by_slot(self._num_slots)
        sorted_x = x.index_select(0, rows.pairs)
        added = self._ups(self._downs(sorted_x, rows.starts), rows.starts)
        return y + added.index_select(0, indices)


class StackedAdapters:
    """Adapters of up to `rank`, in one tensor for each of the two matmuls."""

    takes_groups = False

    def __init__(
        self, shape: LinearShape, tokens: Tokens, num_slots: int, rank: int, kernels: Kernels
    ) -> None:
        self._shape = shape
        self._tokens = tokens
        self._rank = rank
        self._kernels: Kernels = kernels
        self.parts = Parts.of(shape.slices.values(), shape.device)
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        self.a = torch.zeros(num_slots, len(shape.slices) * rank, shape.inputs, **options)
        self.b = torch.zeros(num_slots, shape.outputs, rank, **options)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def prepare(self, given: LowRankParts) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not given:
            return None
        a = torch.zeros(self.a.shape[1:], dtype=self._shape.dtype)
        b = torch.zeros(self.b.shape[1:], dtype=self._shape.dtype)
        shard = self._shape.shard_of(given)
        for index, (part, rows) in enumerate(self._shape.slices.items()):
            if part in shard:
                down, up = shard[part]
                first = index * self._rank
                a[first : first + len(down)] = down
                b[rows, : len(down)] = up
        if self._shape.device.type == "cuda":
            return a.pin_memory(), b.pin_memory()
        return a, b

    def write(self, slot: int, prepared: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if prepared is None:
            self.b[slot - 1].zero_()
            return
        a, b = prepared
        self.a[slot - 1].copy_(a, non_blocking=True)
        self.b[slot - 1].copy_(b, non_blocking=True)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens = self._tokens.current
        if tokens is None:
            return y
        return add_lora(x, y, self.a, self.b, tokens.slots, self.parts, kernels=self._kernels)
