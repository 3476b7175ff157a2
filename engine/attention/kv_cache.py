"""KVCache: the paged keys and values of all layers, and the states of recurrent ones.

Layers of equal shape that see the same keys form a class: all keys of the sequence, a window of one
size, or the keys of the source. Each class is split into KV groups with the same number of layers.
Every group has its own block tables over one shared pool of blocks. A block holds the KV of
`block_size` tokens for the layers of the group that allocated it. So layers with a window keep only
the KV inside the window, even if other layers keep all of it.

A block consists of slots. The widest layers have one slot each; narrower ones share a slot, as many
as fit. Their rows in the slot's tensor are counted in units of a layer, which is why the entries of
a group's block tables are numbers of blocks times the layers in a slot.

A state has a fixed size, however long its sequence. A slot holds one state of every recurrent
layer: behind the last token of a running sequence, or a snapshot at a block edge. The scheduler
decides which (engine/scheduling/state_slots.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from engine.attention.spec import AttentionSpec
from engine.device.transfer import to_device
from engine.ops.kv_codes import SCALE_BYTES, is_coded
from engine.ops.untouched import untouched_zeros
from engine.protocol.ready import KVGroup

# The tensors of one recurrent layer's states, each [slots + 1, ...]; slot 0 is always zero.
LayerStates = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's blocks. The part of one head in a block is contiguous: [block_size, head_dim]."""

    # A backend may store each key block transposed: see AttentionBackend.transposes_keys.
    # [rows, num_kv_heads, block_size, head_dim]: a row for each entry that a table may have. Row 0
    # belongs to the null block.
    keys: torch.Tensor
    values: torch.Tensor | None  # same shape; None: they are parts of the keys
    group: int  # index of the KV group whose block tables refer to these blocks
    # Keys and values are codes if there are scales. See engine/ops/kv_codes.py.
    key_scales: torch.Tensor | None = None  # [rows, num_kv_heads, block_size] fp32
    value_scales: torch.Tensor | None = None  # same shape; None without values


class KVShape(NamedTuple):
    """The size of one layer's keys, and of its values if there are any, of one token."""

    num_kv_heads: int
    head_dim: int
    has_values: bool

    @property
    def copies(self) -> int:
        """How many tensors of this size a slot has: keys, and values if there are any."""
        return 2 if self.has_values else 1

    @property
    def width(self) -> int:
        return self.num_kv_heads * self.head_dim


class LayerClass(NamedTuple):
    """The keys that the layers of a class see, and their shape."""

    window: int | None
    is_cross: bool
    shape: KVShape


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The KV groups of a model's layers. Layer i is number `places[i]` of group `owners[i]`.

    A slot of `width` numbers for keys, and as many for values if a layer has any, holds
    `strides[g]` layers of group g for each token.
    """

    groups: tuple[KVGroup, ...]
    strides: tuple[int, ...]
    shapes: tuple[KVShape, ...]  # of the layers of each group
    owners: tuple[int, ...]
    places: tuple[int, ...]
    num_slots: int
    width: int

    @property
    def has_values(self) -> bool:
        return any(shape.has_values for shape in self.shapes)


def _class_of(spec: AttentionSpec) -> LayerClass:
    shape = KVShape(spec.num_kv_heads, spec.head_dim, spec.value_dim is None)
    return LayerClass(spec.window, spec.kind == "cross", shape)


def one_of_each_class(specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """Return the first layer of each class."""
    return list({_class_of(spec): spec for spec in reversed(specs)}.values())[::-1]


def group_layers(specs: Sequence[AttentionSpec]) -> KVGroups:
    """Assign the layers of a model to KV groups.

    A group has as many slots as the smallest class, so that little of a block stays unused.
    """
    classes: dict[LayerClass, list[int]] = {}
    for layer, spec in enumerate(specs):
        classes.setdefault(_class_of(spec), []).append(layer)
    width = math.lcm(*(keys.shape.width for keys in classes))
    strides = {keys: width // keys.shape.width for keys in classes}
    slots = {keys: -(-len(layers) // strides[keys]) for keys, layers in classes.items()}
    size = min(slots.values(), default=0)
    groups: list[KVGroup] = []
    chosen: list[LayerClass] = []  # of each group
    owners = [0] * len(specs)
    places = [0] * len(specs)
    for keys, layers in classes.items():
        most = size * strides[keys]
        for first in range(0, len(layers), most):
            members = layers[first : first + most]
            for place, layer in enumerate(members):
                owners[layer] = len(groups)
                places[layer] = place
            groups.append(KVGroup(len(members), keys.window, keys.is_cross))
            chosen.append(keys)
    return KVGroups(
        groups=tuple(groups),
        strides=tuple(strides[keys] for keys in chosen),
        shapes=tuple(keys.shape for keys in chosen),
        owners=tuple(owners),
        places=tuple(places),
        num_slots=size,
        width=width,
    )


class KVCache:
    """KV cache of `num_blocks` blocks of `block_size` tokens, and the null block 0."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Sequence[LayerStates] | None = None,
    ) -> None:
        """`dtype` is that of stored keys and values: int8 and float8_e4m3fn are codes.

        `states` are those of the layers that keep a state instead; None if there are none.
        """
        self.states = states
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layout = layout = group_layers(specs)
        self.groups, self.strides = layout.groups, layout.strides
        # Torch has few operations on fp8. All that move bits exist for int8.
        kept = torch.int8 if is_coded(dtype) else dtype
        blocks = (num_blocks + 1, block_size * layout.width)
        slots = range(layout.num_slots)
        # Zeros, not empty: masked keys have weight 0, and 0 * NaN would be NaN.
        self._keys = [untouched_zeros(blocks, kept, device) for _ in slots]
        values = slots if layout.has_values else ()
        self._values = [untouched_zeros(blocks, kept, device) for _ in values]
        # Each shape has its own scales: they are few, and no whole fraction of a slot.
        self._scales: dict[KVShape, list[torch.Tensor]] = {}
        if is_coded(dtype):
            for shape, stride in set(zip(layout.shapes, layout.strides, strict=True)):
                rows = (num_blocks + 1, stride * shape.num_kv_heads * block_size)
                count = shape.copies * len(slots)
                self._scales[shape] = [
                    untouched_zeros(rows, torch.float32, device) for _ in range(count)
                ]
        self.layers = [
            self._layer(owner, place, dtype)
            for owner, place in zip(layout.owners, layout.places, strict=True)
        ]

    @classmethod
    def of_one_step(
        cls,
        specs: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return a cache whose layers of one class share their blocks: the last one keeps them.

        Each layer must write the keys that it reads in the same step.
        """
        kept = one_of_each_class(specs)
        cache = cls(kept, num_blocks, block_size, dtype, device)
        places = {_class_of(spec): place for place, spec in enumerate(kept)}
        cache.layers = [cache.layers[places[_class_of(spec)]] for spec in specs]
        return cache

    def _layer(self, group: int, place: int, dtype: torch.dtype) -> LayerKV:
        slot, first = divmod(place, self.strides[group])
        shape = self.layout.shapes[group]
        heads, size = shape.num_kv_heads, self.block_size
        values = None

        def of_layer(slots: list[torch.Tensor]) -> torch.Tensor:
            rows = slots[slot].view(-1, heads, size, shape.head_dim)
            return rows[first:].view(dtype)

        if shape.has_values:
            values = of_layer(self._values)
        if not is_coded(dtype):
            return LayerKV(of_layer(self._keys), values, group)
        scales = self._scales[shape][shape.copies * slot :][: shape.copies]
        own = [each.view(-1, heads, size)[first:] for each in scales]
        return LayerKV(of_layer(self._keys), values, group, *own)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return self._keys + self._values + [each for some in self._scales.values() for each in some]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def read_parts(
        self,
        group: int,
        sources: Sequence[int],
        targets: Sequence[int],
        tokens: Sequence[int],
        *,
        transposed_keys: bool,
    ) -> Iterator[PartCopies]:
        """Copy the first `tokens` of each source block of a group, for `write_parts`.

        Each of the yielded copies is of one tensor of a layer. The rest of a block is zeros.
        """
        device = self._keys[0].device
        source, target, count = to_device([sources, targets, tokens], device)
        source, target = source * self.strides[group], target * self.strides[group]
        places = torch.arange(self.block_size, device=count.device)
        is_rest = (places >= count[:, None])[:, None, :]  # [copies, 1, block_size]
        for kv in self.layers:
            if kv.group != group:
                continue
            yield _read(kv.keys, source, target, is_rest, transposed=transposed_keys)
            if kv.values is not None:
                yield _read(kv.values, source, target, is_rest, transposed=False)
            for scales in (kv.key_scales, kv.value_scales):
                if scales is not None:
                    copies = scales.index_select(0, source).masked_fill_(is_rest, 0)
                    yield PartCopies(scales, target, copies)

    def of_block(self, group: int, block: int) -> list[torch.Tensor]:
        """Return views of what a block of a group holds: each layer's keys, values and scales.

        Each is contiguous, with a head as its first dimension.
        """
        row = block * self.strides[group]
        layers = [kv for kv in self.layers if kv.group == group]
        parts = [(kv.keys, kv.values, kv.key_scales, kv.value_scales) for kv in layers]
        return [each[row] for part in parts for each in part if each is not None]

    def scrub(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros in all layers."""
        (index,) = to_device([blocks], self._keys[0].device)
        for tensor in self._tensors:
            tensor.index_fill_(0, index, 0)


class PartCopies(NamedTuple):
    """Copies [copies, ...] of blocks, and the rows [copies] of a tensor where they go."""

    tensor: torch.Tensor
    rows: torch.Tensor
    copies: torch.Tensor


def write_parts(copies: Iterable[PartCopies]) -> None:
    """Write what `read_parts` has yielded."""
    for each in copies:
        each.tensor.index_copy_(0, each.rows, each.copies)


def _read(
    numbers: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    is_rest: torch.Tensor,
    *,
    transposed: bool,
) -> PartCopies:
    """Return the copies of blocks of keys or values [blocks, Hkv, block_size, head_dim]."""
    if numbers.dtype.itemsize == 1:
        numbers = numbers.view(torch.int8)
    copies = numbers.index_select(0, source)
    of_tokens = copies
    if transposed:
        of_tokens = copies.view(*copies.shape[:2], -1, copies.shape[2]).transpose(2, 3)
    of_tokens.masked_fill_(is_rest[..., None], 0)
    return PartCopies(numbers, target, copies)


def block_bytes(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block in bytes: keys and values of all layers of a group."""
    layout = group_layers(specs)
    copies = 2 if layout.has_values else 1
    size = copies * layout.width * dtype.itemsize
    if is_coded(dtype):
        for shape, stride in set(zip(layout.shapes, layout.strides, strict=True)):
            size += shape.copies * stride * shape.num_kv_heads * SCALE_BYTES
    return layout.num_slots * size * block_size
