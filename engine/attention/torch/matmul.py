"""MatmulAttention: attention of a query group with matmul, softmax, matmul."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import SPLIT, QueryGroup
from engine.attention.torch.mask import attention_mask
from engine.attention.torch.query_rows import QueryRows, gather_pieces, missing_rows, piece_index
from engine.device.facts import onednn_emulates_bf16


class MatmulAttention:
    """Attention of one query group in all layers with the same spec.

    It supports any dtype and an optional softcap. Weighted values are summed in splits of 256 keys.
    So the order of the reduction over keys does not depend on the batch, the padding or the chunk.
    """

    def __init__(
        self,
        group: QueryGroup,
        spec: AttentionSpec,
        block_size: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        tables = _whole_splits(group.tables, block_size, dtype)
        num_keys = tables.shape[1] * block_size
        self.rows = QueryRows(group, spec)
        self._spec = spec
        self._is_windowed = group.first_keys is not None
        self._num_splits = -(-num_keys // SPLIT)
        num_matmuls = self.rows.num_matmuls
        num_rows = self.rows.num_rows
        fewest = 2 if onednn_emulates_bf16(tables.device, dtype) else 1
        products = num_matmuls * num_keys * spec.head_dim
        self._padding = missing_rows(num_rows, products, dtype, fewest=fewest)
        mask = attention_mask(group, spec, num_keys, dtype, bias)
        mask = mask.expand(-1, spec.num_heads, -1, -1).reshape(num_matmuls, num_rows, num_keys)
        # [N, R + padding, keys]. Without padding, the heads of one sequence share memory.
        self._mask = F.pad(mask, (0, 0, 0, self._padding)) if self._padding else mask
        self._index = piece_index(tables, spec.num_kv_heads)
        pieces = (len(self._index), block_size, spec.head_dim)
        self._pieces = torch.empty(pieces, dtype=dtype, device=tables.device)
        self._keys = self._pieces.view(num_matmuls, num_keys, spec.head_dim).transpose(1, 2)
        # Values reuse the keys' buffer: they are gathered once the scores are computed, if the keys
        # do not hold them.
        by_split = self._pieces.view(num_matmuls * self._num_splits, -1, spec.head_dim)
        self._values = by_split[..., : spec.result_dim]

    def __call__(
        self, kv: LayerKV, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [S * count, H, result_dim] for the queries [T, H, D]."""
        gather_pieces(kv.keys, kv.key_scales, self._index, self._pieces)
        rows = self.rows.gather(query, self._padding)
        weights = self._weights(rows, sinks)
        if kv.values is not None:
            gather_pieces(kv.values, kv.value_scales, self._index, self._pieces)
        if self._num_splits == 1:
            return self.rows.by_token(torch.bmm(weights, self._values))
        num_matmuls, num_rows, _ = weights.shape
        by_split = weights.view(num_matmuls, num_rows, self._num_splits, SPLIT).transpose(1, 2)
        parts = torch.bmm(by_split.reshape(-1, num_rows, SPLIT), self._values)
        parts = parts.view(num_matmuls, self._num_splits, num_rows, -1)
        return self.rows.by_token(_sum_splits(parts, self._is_windowed))

    def _weights(self, rows: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the softmax of the scores, [N, R, keys], for the rows [N, R, D]."""
        spec = self._spec
        if spec.softcap is None:
            scores = torch.baddbmm(self._mask, rows, self._keys, alpha=spec.scale)
        else:
            scores = torch.bmm(rows, self._keys).float().mul_(spec.scale / spec.softcap)
            scores.tanh_().mul_(spec.softcap).add_(self._mask)
        if sinks is None:
            return torch.softmax(scores, dim=-1).to(rows.dtype)  # fp32 inside
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        by_row = self.rows.by_head(sinks, self._padding)
        return (weights * _share_of_keys(scores, weights, by_row)).to(rows.dtype)


def _share_of_keys(
    scores: torch.Tensor, weights: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the weight of all keys together, [N, R, 1], when a sink [N, R] takes the rest.

    `weights` are the softmax of `scores` alone. Only maxima are computed: the bits of a sum would
    depend on the number of masked keys.
    """
    highest = scores.amax(-1, keepdim=True).float()
    largest = weights.amax(-1, keepdim=True)  # 1 / sum of exp(score - highest)
    above = sinks[..., None] - highest
    ratio = torch.exp(above) * largest  # of the sink's weight to that of all keys
    return 1 / (1 + ratio)


def _whole_splits(tables: torch.Tensor, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return block tables padded with the null block to a multiple of SPLIT keys.

    A single split needs no padding, except in fp32.
    """
    blocks_per_split = SPLIT // block_size
    num_blocks = tables.shape[1]
    if num_blocks <= blocks_per_split and dtype != torch.float32:
        return tables
    return F.pad(tables, (0, -num_blocks % blocks_per_split))


def _sum_splits(parts: torch.Tensor, is_windowed: bool) -> torch.Tensor:
    """Sum [N, splits, R, D] over the splits in fp32; return [N, R, D].

    With a window, the number of leading splits in which a query sees no key differs between steps.
    Splits are then added one by one, so that the zeros of those splits change no bit.
    """
    if not is_windowed:
        return parts.sum(1, dtype=torch.float32).to(parts.dtype)
    total = parts[:, 0].float()
    for split in range(1, parts.shape[1]):
        total = total + parts[:, split]
    return total.to(parts.dtype)
