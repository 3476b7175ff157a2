"""FusedAttention: attention of a query group with torch's fused CPU kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import FUSED_SPLIT, QueryGroup
from engine.attention.torch.mask import attention_mask
from engine.attention.torch.query_rows import QueryRows, gather_pieces, missing_rows, piece_index
from engine.device.facts import cpu_has_amx, onednn_has_matmul

# The fused kernel takes rows in multiples of 32. With heads narrower than 32, even 32 rows would be
# a small product.
FUSED_ROWS = 32
FUSED_HEAD_DIM = 32


class FusedAttention:
    """Attention of one query group in all layers with the same spec. It does not store the scores.

    In bf16 on a CPU with AMX, a row's bits do not depend on the other rows or on masked keys. On
    other CPUs they do: the kernel uses MKL there, whose order of summation depends on the number of
    keys. There it is also slower than oneDNN's matmuls.
    """

    @staticmethod
    def supports(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        if spec.softcap or spec.has_sinks or spec.head_dim < FUSED_HEAD_DIM:
            return False
        if spec.value_dim is not None:  # the kernel needs keys and values of one width
            return False
        return dtype == torch.bfloat16 and onednn_has_matmul(device, dtype) and cpu_has_amx()

    def __init__(
        self,
        group: QueryGroup,
        spec: AttentionSpec,
        block_size: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        heads = spec.num_kv_heads
        num_keys = group.tables.shape[1] * block_size
        self.rows = QueryRows(group, spec)
        self.num_sequences = group.sequences
        self._scale = spec.scale
        self._padding = self._padding_rows(num_keys, spec.head_dim, dtype)
        mask = attention_mask(group, spec, num_keys, dtype, bias)
        if mask.shape[1] == 1:  # the same for all heads
            mask = mask.expand(-1, spec.num_heads // heads, -1, -1)
        mask = mask.reshape(group.sequences, -1, self.rows.num_rows, num_keys)
        self._mask = F.pad(mask, (0, 0, 0, self._padding))  # [S, Hkv or 1, R + padding, keys]
        self._index = piece_index(group.tables, heads)
        pieces = (len(self._index), block_size, spec.head_dim)
        self._key_pieces = torch.empty(pieces, dtype=dtype, device=mask.device)
        self._value_pieces = torch.empty_like(self._key_pieces)
        self._keys = self._key_pieces.view(group.sequences, heads, num_keys, -1)
        self._values = self._value_pieces.view_as(self._keys)
        self._query_shape = (group.sequences, heads, -1, spec.head_dim)

    def _padding_rows(self, num_keys: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the padding that keeps the kernel's last product from being a small one."""
        last_rows = self.rows.num_rows % FUSED_ROWS or FUSED_ROWS
        last_keys = num_keys % FUSED_SPLIT or min(num_keys, FUSED_SPLIT)
        return missing_rows(last_rows, last_keys * head_dim, dtype, fewest=2)

    def __call__(
        self, kv: LayerKV, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [S * count, H, D] for the queries [T, H, D]."""
        assert sinks is None
        assert kv.values is not None
        gather_pieces(kv.keys, kv.key_scales, self._index, self._key_pieces)
        gather_pieces(kv.values, kv.value_scales, self._index, self._value_pieces)
        rows = self.rows.gather(query, self._padding)
        outputs = F.scaled_dot_product_attention(
            rows.view(self._query_shape),
            self._keys,
            self._values,
            attn_mask=self._mask,
            scale=self._scale,
        )
        return self.rows.by_token(outputs.flatten(0, 1))
