"""The sizes and features of attention that launchers pass to the kernels as constants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.compiler.compiler import max_shared_mem

from engine.kernels.triton.kv_codes import KINDS

MAX_HEAD_DIM = 512
MAX_REST = 128  # numbers of a key behind its value
MAX_HEADS = 16  # of a program, if values are parts of keys: more results would spill registers
MIN_DOT = 16  # tl.dot's smallest side
# Of keys and of values that are codes, [blocks, Hkv, block_size] fp32 each.
Scales = tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Features:
    """How a layer computes its attention scores.

    `bias` [H, 2 * reach + 1] fp32 is added by distance (key - query), clamped to [-reach, reach].
    `sinks` [H] are scores that have no value.
    """

    scale: float
    window: int | None = None  # as in AttentionSpec
    softcap: float | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def bias_reach(self) -> int | None:
        return None if self.bias is None else self.bias.shape[1] // 2

    @property
    def arguments(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """The arguments of both kernels that these features set."""
        return self.bias, self.sinks, self.scale

    @property
    def constants(self) -> dict[str, float | None]:
        """The constants of both kernels that these features set."""
        return {"WINDOW": self.window, "SOFTCAP": self.softcap, "BIAS_REACH": self.bias_reach}


def as_loaded(
    keys: torch.Tensor, values: torch.Tensor | None, scales: Scales
) -> tuple[torch.Tensor | None, ...]:
    """Return keys, values and the scales of both, as kernels take them."""
    if scales is None:
        return keys, values, None, None
    kind = KINDS[keys.dtype]
    return keys.view(kind), None if values is None else values.view(kind), *scales


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a program's queries, keys and values, constants of both kernels.

    If values are parts of keys, programs compute the query heads of a kv head in parts.
    """

    dim: int
    value_dim: int
    shared: int  # query heads of a part
    parts: int

    @classmethod
    def of(
        cls, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor
    ) -> HeadShape:
        """Return the shape for the arguments of `decode_attention` and `extend_attention`."""
        shared = query.shape[1] // keys.shape[1]
        parts = 1
        if values is None:
            wanted = range(-(-shared // MAX_HEADS), shared)
            parts = next((count for count in wanted if shared % count == 0), shared)
        return cls(query.shape[2], out.shape[2], shared // parts, parts)

    @property
    def constants(self) -> dict[str, int]:
        rest = self.dim - self.value_dim
        return {
            "SHARED": self.shared,
            "PARTS": self.parts,
            "HEAD_DIM": self.dim,
            "VALUE_DIM": self.value_dim,
            "DIMS": padded(self.value_dim),
            "REST": padded(rest) if rest else 0,
        }


def padded(size: int) -> int:
    """Return the power of two that a tile needs for `size` rows or columns; at least MIN_DOT."""
    return max(MIN_DOT, triton.next_power_of_2(size))


def keys_per_tile(head_dim: int, dtype: torch.dtype, *, is_coded: bool = False) -> int:
    """Return the number of keys in a tile.

    It depends only on the arguments, so that no result depends on the rest of the batch.
    """
    elements = 8192 if dtype.itemsize == 2 else 2048
    if is_coded:  # codes are widened in registers
        elements //= 2
    return _fitting(head_dim, elements, 64)


def rows_per_tile(shared: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the rows of an extend tile: queries times the `shared` query heads of a kv head."""
    if dtype.itemsize == 2:
        elements = 16384
        most = 128
    else:
        elements = 2048
        most = 64
    if head_dim % 8:  # rows cannot be copied 16 bytes at a time: loads pass through registers
        elements //= 2
    rows = _fitting(head_dim, elements, most)
    return max(padded(shared), rows)


def shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a program may use, or None without a GPU."""
    if device.type != "cuda":
        return None
    return int(max_shared_mem(device.index or 0))


def _fitting(head_dim: int, elements: int, most: int) -> int:
    """Return how many rows of `head_dim` fit in `elements`, at most `most`; more spill registers.

    Callers pass lower limits for fp32, which uses no tensor cores.
    """
    rows = elements // padded(head_dim)
    return min(max(rows, MIN_DOT), most)
