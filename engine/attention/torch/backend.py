"""Paged attention in plain torch: the reference for every kernel, and the CPU's default.

Sequences of similar shape form a group and are computed together. Whole blocks are gathered, head
by head; blocks before the window are not gathered. The order of a reduction over keys does not
depend on the batch, the padding or the chunk. Together with linear layers that are exact per row
(see layers/linear.py), this makes a token's logits bitwise independent of the rest of its step.
"""

from __future__ import annotations

import torch

from engine.attention.backend import StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import QueryGroup, query_groups
from engine.attention.torch.fused import FusedAttention
from engine.attention.torch.long_texts import LongTextAttention, is_long_text
from engine.attention.torch.matmul import MatmulAttention
from engine.attention.torch.whole_texts import text_groups, token_blocks
from engine.ops.kv_codes import to_codes

GroupAttention = FusedAttention | MatmulAttention | LongTextAttention


class TorchBackend:
    """Supports every AttentionSpec on every device and dtype."""

    name = "torch"
    supports_capture = False  # it needs the sequence lengths on the host
    reads_masked_keys = True  # it gathers whole blocks
    transposes_keys = False

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, layout: StepLayout) -> TorchPlan:
        return TorchPlan(layout)


class TorchPlan:
    """The query groups, store indices and masks of one step, shared by all layers."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout = layout
        self._query_groups: dict[int, list[QueryGroup]] = {}  # by KV group
        # By KV group, spec and id of the bias.
        self._attentions: dict[tuple[int, AttentionSpec, int], list[GroupAttention]] = {}
        # By KV group and number of heads: the index of each token and head in the cache.
        self._store_indices: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if kv is None:
            assert key is not None
            assert value is not None
            kv = token_blocks(key, value, group=len(self.layout.groups))
        elif key is not None:
            self.store(kv, key, value)
        attentions = self._attentions.get((kv.group, spec, id(bias)))
        if attentions is None:
            attentions = self._prepare(kv, spec, query.dtype, bias)
            self._attentions[kv.group, spec, id(bias)] = attentions
        if len(attentions) == 1 and attentions[0].rows.order is None:
            return attentions[0](kv, query, sinks)
        result = query.new_empty(*query.shape[:2], spec.result_dim)
        for attention in attentions:
            attention.rows.write(attention(kv, query, sinks), result)
        return result

    def _prepare(
        self, kv: LayerKV, spec: AttentionSpec, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> list[GroupAttention]:
        groups = self._query_groups.get(kv.group)
        if groups is None:
            groups = self._make_groups(kv.group)
            self._query_groups[kv.group] = groups
        kind: type[FusedAttention | MatmulAttention] = MatmulAttention
        if FusedAttention.supports(spec, dtype, self.layout.positions.device):
            kind = FusedAttention
        block_size = kv.keys.shape[2]

        def prepare(group: QueryGroup) -> FusedAttention | MatmulAttention:
            return kind(group, spec, block_size, dtype, bias)

        is_text = spec.kind == "full"
        return [
            LongTextAttention(group, spec, prepare)
            if is_text and is_long_text(group)
            else prepare(group)
            for group in groups
        ]

    def _make_groups(self, kv_group: int) -> list[QueryGroup]:
        if kv_group == len(self.layout.groups):  # the step's own keys, see token_blocks
            return text_groups(self.layout)
        return query_groups(self.layout, self.layout.groups[kv_group])

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
        heads = key.shape[1]
        index = self._store_indices.get((kv.group, heads))
        if index is None:
            index = self._store_index(kv.group, heads)
            self._store_indices[kv.group, heads] = index
        _store(kv.keys, kv.key_scales, index, key)
        if kv.values is not None:
            assert value is not None
            _store(kv.values, kv.value_scales, index, value)

    def _store_index(self, kv_group: int, num_heads: int) -> tuple[torch.Tensor, ...]:
        """Return block, head and offset in the block, [T, Hkv] each, of the step's tokens."""
        blocks = self.layout.groups[kv_group].token_blocks
        offsets = self.layout.token_offsets
        heads = torch.arange(num_heads, device=blocks.device)
        index = torch.broadcast_tensors(blocks[:, None], heads, offsets[:, None])
        return tuple(part.contiguous() for part in index)


def _store(
    blocks: torch.Tensor,
    scales: torch.Tensor | None,
    index: tuple[torch.Tensor, ...],
    numbers: torch.Tensor,
) -> None:
    """Write numbers [T, Hkv, D] to the places `index` of the blocks."""
    if scales is not None:
        numbers, new_scales = to_codes(numbers, blocks.dtype)
        scales.index_put_(index, new_scales)
    blocks.index_put_(index, numbers)
