"""KVCache: the paged keys and values of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's blocks; a kernel reads a block of a head as one [block_size, head_dim] piece."""

    keys: torch.Tensor  # [num_blocks + 1, num_kv_heads, block_size, head_dim]; block 0 is the null
    values: torch.Tensor  # same shape


class KVCache:
    """`num_blocks` usable blocks of `block_size` tokens for each of the layers' specs."""

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

        def blocks(spec: AttentionSpec) -> torch.Tensor:
            shape = (num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
            # Zeros, not empty: masked keys weigh 0, and 0 * NaN would be NaN.
            return torch.zeros(shape, dtype=dtype, device=device)

        self.layers = [LayerKV(blocks(spec), blocks(spec)) for spec in specs]

    @property
    def num_bytes(self) -> int:
        return sum(kv.keys.nbytes + kv.values.nbytes for kv in self.layers)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in every layer."""
        index = torch.tensor(blocks, device=self.layers[0].keys.device)
        for kv in self.layers:
            kv.keys.index_fill_(0, index, 0)
            kv.values.index_fill_(0, index, 0)


def block_bytes(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers, keys and values."""
    per_token = sum(2 * s.num_kv_heads * s.head_dim for s in specs)
    return per_token * block_size * dtype.itemsize
