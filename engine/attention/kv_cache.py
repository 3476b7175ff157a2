"""KVCache: the paged keys and values of all layers.

Layers that see the same keys form a class: all keys of the sequence, a window of one size, or the
keys of the source. Each class is split into KV groups with the same number of layers. Every group
has its own block tables over one shared pool of blocks. A block holds the KV of `block_size` tokens
for the layers of the group that allocated it. So layers with a window keep only the KV inside the
window, even if other layers keep all of it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.attention.spec import AttentionSpec
from engine.device.transfer import to_device
from engine.ops.kv_codes import SCALE_BYTES, is_coded
from engine.protocol.ready import KVGroup


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's blocks. The part of one head in a block is contiguous: [block_size, head_dim]."""

    # A backend may store each key block transposed: see AttentionBackend.transposes_keys.
    keys: torch.Tensor  # [num_blocks + 1, num_kv_heads, block_size, head_dim]; block 0 is null
    values: torch.Tensor | None  # same shape; None: they are parts of the keys
    group: int  # index of the KV group whose block tables refer to these blocks
    # Keys and values are codes if there are scales. See engine/ops/kv_codes.py.
    key_scales: torch.Tensor | None = None  # [num_blocks + 1, num_kv_heads, block_size] fp32
    value_scales: torch.Tensor | None = None  # same shape; None without values


class LayerClass(NamedTuple):
    """The keys that the layers of a class see."""

    window: int | None
    is_cross: bool


class KVShape(NamedTuple):
    """The size of one layer's keys, and of its values if there are any, of one token."""

    num_kv_heads: int
    head_dim: int
    has_values: bool

    @property
    def copies(self) -> int:
        """How many tensors of this size a slot has: keys, and values if there are any."""
        return 2 if self.has_values else 1


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The KV groups of a model's layers. Layer i is number `slots[i]` of group `owners[i]`."""

    groups: tuple[KVGroup, ...]
    owners: tuple[int, ...]
    slots: tuple[int, ...]
    shapes: tuple[KVShape, ...]  # of each slot


def group_layers(specs: Sequence[AttentionSpec]) -> KVGroups:
    """Assign the layers of a model to KV groups.

    A group has as many layers as the smallest class, so that little of a block stays unused.
    """
    classes = _layer_classes(specs)
    size = min(map(len, classes.values()), default=0)
    groups: list[KVGroup] = []
    owners = [0] * len(specs)
    slots = [0] * len(specs)
    for keys, layers in classes.items():
        for first in range(0, len(layers), size):
            members = layers[first : first + size]
            for slot, layer in enumerate(members):
                owners[layer] = len(groups)
                slots[layer] = slot
            groups.append(KVGroup(len(members), keys.window, keys.is_cross))
    shapes = [_shape(spec) for spec in specs[:size]]
    return KVGroups(tuple(groups), tuple(owners), tuple(slots), tuple(shapes))


def _layer_classes(specs: Sequence[AttentionSpec]) -> dict[LayerClass, list[int]]:
    """Return the layers of each class; one class of all layers if their KV differs in shape.

    Blocks of different groups would otherwise differ in size.
    """
    classes: dict[LayerClass, list[int]] = {}
    for layer, spec in enumerate(specs):
        keys = LayerClass(spec.window, spec.kind == "cross")
        classes.setdefault(keys, []).append(layer)
    shapes = {_shape(spec) for spec in specs}
    if len(shapes) <= 1:
        return classes
    has_cross = any(keys.is_cross for keys in classes)
    assert not has_cross, "cross layers must have the others' shape"
    every_key = LayerClass(window=None, is_cross=False)
    return {every_key: list(range(len(specs)))}


def _shape(spec: AttentionSpec) -> KVShape:
    return KVShape(spec.num_kv_heads, spec.head_dim, spec.value_dim is None)


class KVCache:
    """KV cache of `num_blocks` blocks of `block_size` tokens, and the null block 0."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype` is that of stored keys and values: int8 and float8_e4m3fn are codes."""
        self.block_size = block_size
        self.num_blocks = num_blocks
        layout = group_layers(specs)
        self.groups = layout.groups

        # One tensor per slot, which one layer of each group uses.
        shapes = dict(enumerate(layout.shapes))
        with_values = {slot: shape for slot, shape in shapes.items() if shape.has_values}
        self._keys = self._numbers(shapes, dtype, device)
        self._values = self._numbers(with_values, dtype, device)
        self._key_scales: dict[int, torch.Tensor] = {}
        self._value_scales: dict[int, torch.Tensor] = {}
        if is_coded(dtype):
            self._key_scales = self._scales(shapes, device)
            self._value_scales = self._scales(with_values, device)
        self.layers = [
            self._layer(owner, slot, dtype)
            for owner, slot in zip(layout.owners, layout.slots, strict=True)
        ]

    def _numbers(
        self, shapes: Mapping[int, KVShape], dtype: torch.dtype, device: torch.device
    ) -> dict[int, torch.Tensor]:
        # Torch has few operations on fp8. All that move bits exist for int8.
        kept = torch.int8 if is_coded(dtype) else dtype
        numbers = {}
        for slot, kv in shapes.items():
            # Zeros, not empty: masked keys have weight 0, and 0 * NaN would be NaN.
            shape = (self.num_blocks + 1, kv.num_kv_heads, self.block_size, kv.head_dim)
            numbers[slot] = untouched_zeros(shape, kept, device)
        return numbers

    def _scales(
        self, shapes: Mapping[int, KVShape], device: torch.device
    ) -> dict[int, torch.Tensor]:
        scales = {}
        for slot, kv in shapes.items():
            shape = (self.num_blocks + 1, kv.num_kv_heads, self.block_size)
            scales[slot] = untouched_zeros(shape, torch.float32, device)
        return scales

    def _layer(self, group: int, slot: int, dtype: torch.dtype) -> LayerKV:
        keys = self._keys[slot].view(dtype)
        values = self._values.get(slot)
        if values is not None:
            values = values.view(dtype)
        scales = self._key_scales.get(slot), self._value_scales.get(slot)
        return LayerKV(keys, values, group, *scales)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        slots = self._keys, self._values, self._key_scales, self._value_scales
        return [tensor for by_slot in slots for tensor in by_slot.values()]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def copy_parts(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        tokens: Sequence[int],
        *,
        transposed_keys: bool,
    ) -> None:
        """Copy the first `tokens` of each source block to a target block, in all layers.

        The rest of a target is filled with zeros. All sources of a layer are read before a target
        is written.
        """
        source, target, count = to_device([sources, targets, tokens], self._keys[0].device)
        places = torch.arange(self.block_size, device=count.device)
        is_rest = (places >= count[:, None])[:, None, :]  # [copies, 1, block_size]
        for slots, is_transposed in ((self._keys, transposed_keys), (self._values, False)):
            for blocks in slots.values():
                copies = blocks.index_select(0, source)
                of_tokens = copies
                if is_transposed:
                    of_tokens = copies.view(*copies.shape[:2], -1, self.block_size).transpose(2, 3)
                of_tokens.masked_fill_(is_rest[..., None], 0)
                blocks.index_copy_(0, target, copies)
        for scales in (*self._key_scales.values(), *self._value_scales.values()):
            scales.index_copy_(0, target, scales.index_select(0, source).masked_fill_(is_rest, 0))

    def scrub(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros in all layers."""
        (index,) = to_device([blocks], self._keys[0].device)
        for tensor in self._tensors:
            tensor.index_fill_(0, index, 0)


def untouched_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros. On a CPU they are mapped only: a page takes memory once it is written to."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags | getattr(mmap, "MAP_NORESERVE", 0))
    except OSError as error:  # more than the address space that is left
        raise MemoryError(f"{size} bytes of KV cache cannot be mapped: {error}") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def block_bytes(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block in bytes: keys and values of all layers of a group."""
    scale = SCALE_BYTES if is_coded(dtype) else 0
    bytes_per_token = sum(
        shape.copies * shape.num_kv_heads * (shape.head_dim * dtype.itemsize + scale)
        for shape in group_layers(specs).shapes
    )
    return bytes_per_token * block_size
