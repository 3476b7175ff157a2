"""KVCache: the paged keys and values of all layers.

Layers that see the same keys form a class: all keys of the sequence, a window of one size, or the
keys of the source. Each class is split into KV groups with the same number of layers. Every group
has its own block tables over one shared pool of blocks. A block holds the KV of `block_size` tokens
for the layers of the group that allocated it. So layers with a window keep only the KV inside the
window, even if other layers keep all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.spec import AttentionSpec
from engine.device.transfer import to_device
from engine.protocol import KVGroup


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's blocks. The part of one head in a block is contiguous: [block_size, head_dim]."""

    # The Numba kernels store each key block transposed, as [head_dim, block_size].
    keys: torch.Tensor  # [num_blocks + 1, num_kv_heads, block_size, head_dim]; block 0 is null
    values: torch.Tensor  # same shape
    group: int  # index of the KV group whose block tables refer to these blocks


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The KV groups of a model's layers. Layer i is number `slots[i]` of group `owners[i]`."""

    groups: tuple[KVGroup, ...]
    owners: tuple[int, ...]
    slots: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]  # (num_kv_heads, head_dim) of each slot


def group_layers(specs: Sequence[AttentionSpec]) -> KVGroups:
    """Assign the layers of a model to KV groups.

    A group has as many layers as the smallest class, so that little of a block stays unused.
    """
    classes: dict[tuple[int | None, bool], list[int]] = {}
    for layer, spec in enumerate(specs):
        classes.setdefault((spec.window, spec.kind == "cross"), []).append(layer)
    shapes = [(spec.num_kv_heads, spec.head_dim) for spec in specs]
    if len(set(shapes)) > 1:  # one group: blocks of different groups would differ in size
        assert not any(cross for _, cross in classes), "cross layers must have the others' shape"
        classes = {(None, False): list(range(len(specs)))}
    size = min(map(len, classes.values()), default=0)
    groups: list[KVGroup] = []
    owners, slots = [0] * len(specs), [0] * len(specs)
    for (window, cross), layers in classes.items():
        for first in range(0, len(layers), size):
            for slot, layer in enumerate(members := layers[first : first + size]):
                owners[layer], slots[layer] = len(groups), slot
            groups.append(KVGroup(len(members), window, cross))
    return KVGroups(tuple(groups), tuple(owners), tuple(slots), tuple(shapes[:size]))


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
        self.block_size = block_size
        self.num_blocks = num_blocks
        layout = group_layers(specs)
        self.groups = layout.groups

        def blocks(heads: int, dim: int) -> torch.Tensor:
            # Zeros, not empty: masked keys have weight 0, and 0 * NaN would be NaN.
            shape = (num_blocks + 1, heads, block_size, dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._slots = [(blocks(*shape), blocks(*shape)) for shape in layout.shapes]
        self.layers = [
            LayerKV(*self._slots[slot], owner)
            for owner, slot in zip(layout.owners, layout.slots, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._slots)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros in all layers."""
        (index,) = to_device([blocks], self._slots[0][0].device)
        for keys, values in self._slots:
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)


def block_bytes(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block in bytes: keys and values of all layers of a group."""
    per_token = sum(2 * heads * dim for heads, dim in group_layers(specs).shapes)
    return per_token * block_size * dtype.itemsize
