"""QueryRows: the query heads of a group as the rows of matmuls."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import QueryGroup
from engine.ops.kv_codes import from_codes

# Some shapes use kernels with a different order of summation; padding rows avoid them.
# fp32: rows that are left after groups of four, in the matmuls and in the sum over splits.
# bf16: torch does not use oneDNN for products of few multiplications. A single row has its own
# kernel in the fused attention, and in matmuls on CPUs whose AVX-512 lacks bf16.
ROWS_FP32 = 4
SMALL_PRODUCT = 16**3


class QueryRows:
    """The query heads that share a KV head are rows of one matmul.

    There are N = sequences * KV heads matmuls, each of R = query heads per KV head * count rows.
    """

    def __init__(self, group: QueryGroup, spec: AttentionSpec) -> None:
        sequences = group.sequences
        count = group.count
        heads = spec.num_kv_heads
        shared = spec.num_heads // heads
        dim, result_dim = spec.head_dim, spec.result_dim
        self.order = group.order
        self._tokens = slice(group.first, group.first + sequences * count)
        self.num_matmuls = sequences * heads
        self.num_rows = shared * count
        self._token_shape = (sequences, count, heads, shared, dim)
        self._head_shape = (sequences, heads, shared, count, result_dim)
        self._row_shape = (self.num_matmuls, self.num_rows, dim)
        self._result_shape = (sequences * count, spec.num_heads, result_dim)

    def gather(self, query: torch.Tensor, padding: int) -> torch.Tensor:
        """Return the rows [N, R + padding, D] of the step's queries [T, H, D]."""
        order = self.order
        tokens = query[self._tokens] if order is None else query.index_select(0, order)
        by_head = tokens.view(self._token_shape).permute(0, 2, 3, 1, 4)
        rows = by_head.reshape(self._row_shape)
        if padding:
            rows = F.pad(rows, (0, 0, 0, padding))
        return rows

    def by_head(self, numbers: torch.Tensor, padding: int) -> torch.Tensor:
        """Return a number for each head [H] as those of its rows, [N, R + padding] in fp32."""
        sequences, heads, shared, count, _ = self._head_shape
        own = numbers.float().view(1, heads, shared, 1).expand(sequences, -1, -1, count)
        return F.pad(own.reshape(self.num_matmuls, self.num_rows), (0, padding))

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs [S * count, H, result_dim] in rows [N, R + padding, result_dim]."""
        by_head = rows[:, : self.num_rows].view(self._head_shape)
        return by_head.permute(0, 3, 1, 2, 4).reshape(self._result_shape)

    def write(self, outputs: torch.Tensor, result: torch.Tensor) -> None:
        """Write the group's outputs [S * count, H, result_dim] to those of the step."""
        if self.order is None:
            result[self._tokens] = outputs
        else:
            result.index_copy_(0, self.order, outputs)


def missing_rows(rows: int, products_per_row: int, dtype: torch.dtype, *, fewest: int) -> int:
    """Return the number of padding rows that make a matmul use the kernel of all other shapes."""
    if dtype == torch.float32:
        return -rows % ROWS_FP32
    large_enough = SMALL_PRODUCT // products_per_row + 1
    return max(0, fewest - rows, large_enough - rows)


def piece_index(tables: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the index of each (sequence, head, block) among the cache's pieces [block_size, D].

    `tables` are block tables [sequences, blocks].
    """
    heads = torch.arange(num_heads, device=tables.device)
    return (tables[:, None] * num_heads + heads[:, None]).flatten()


def gather_pieces(
    blocks: torch.Tensor, scales: torch.Tensor | None, index: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the pieces `index` of keys or values, [pieces, block_size, D], to `out`."""
    _, block_size, head_dim = out.shape
    pieces = blocks.view(-1, block_size, head_dim)
    if scales is None:
        torch.index_select(pieces, 0, index, out=out)
        return
    piece_scales = scales.view(-1, block_size)
    from_codes(pieces.index_select(0, index), piece_scales.index_select(0, index), out)
