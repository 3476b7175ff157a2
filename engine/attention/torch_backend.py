"""Paged attention in plain torch: the reference for every kernel, and the CPU's own path.

Sequences with equally many new tokens form a group and are computed together. Their blocks are
gathered whole, head by head; weighted values are summed over splits of 256 keys, so the reduction
over keys has the same order whatever the batch, the padding or the chunk. With row-wise exact
linears (see layers/linear.py) this makes a token's logits independent of what shares its step, bit
by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec

SPLIT = 256  # keys; below it, oneDNN's bf16 matmul reduces fewer keys as if zeros followed
# Rows left over by fours take fp32 kernels with another order of summation, in the matmuls and in
# the sum over splits; bf16 products of few multiplications are not given to oneDNN at all.
ROWS_FP32 = 4
SMALL_PRODUCT = 16**3
# A group is cut where padding short sequences to its longest would more than double the work.
MAX_PADDING = 2


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """`sequences` neighbours with `count` new tokens each, beginning at token `first`."""

    first: int
    sequences: int
    count: int
    tables: torch.Tensor  # [sequences, blocks]
    positions: torch.Tensor  # [sequences, count] of the queries
    order: torch.Tensor | None = None  # [sequences] token indices, where they are no neighbours


class TorchBackend:
    """Honours every AttentionSpec on every device and dtype."""

    name = "torch"

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, layout: StepLayout) -> TorchPlan:
        return TorchPlan(layout)


class TorchPlan:
    """Groups, store index and masks of one step, shared by all layers."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._groups = _groups(layout)
        self._store_index: dict[int, torch.Tensor] = {}
        self._gather_index: dict[tuple[int, int], torch.Tensor] = {}
        self._masks: dict[tuple[int, bool, int | None], torch.Tensor] = {}

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        self._store(kv, key, value)
        outputs = [self._attend_group(i, g, spec, kv, query) for i, g in enumerate(self._groups)]
        if len(outputs) == 1 and self._groups[0].order is None:
            return outputs[0]
        result = torch.empty_like(query)
        for group, output in zip(self._groups, outputs, strict=True):
            if group.order is None:
                result[group.first : group.first + len(output)] = output
            else:
                result.index_copy_(0, group.order, output)
        return result

    def _store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        _, heads, block_size, dim = kv.keys.shape
        index = self._store_index.get(heads)
        if index is None:  # [T * heads]: where (token, head) lies in the cache seen as rows of dim
            head = torch.arange(heads, device=key.device)
            rows = self._layout.token_blocks[:, None] * heads + head
            index = (rows * block_size + self._layout.token_offsets[:, None]).flatten()
            self._store_index[heads] = index
        kv.keys.view(-1, dim).index_copy_(0, index, key.reshape(-1, dim))
        kv.values.view(-1, dim).index_copy_(0, index, value.reshape(-1, dim))

    def _attend_group(
        self, number: int, group: QueryGroup, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor
    ) -> torch.Tensor:
        sequences, count = group.sequences, group.count
        heads, dim, size = spec.num_kv_heads, spec.head_dim, self._layout.block_size
        shared = spec.num_heads // heads
        if group.order is None:
            query = query[group.first : group.first + sequences * count]
        else:
            query = query.index_select(0, group.order)
        # The query heads of one kv head become rows of one matmul: R = shared * count.
        q = (query * spec.scale).view(sequences, count, heads, shared, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(sequences * heads, shared * count, dim)
        index = self._index(number, group, heads, query.dtype)
        keys = len(index) // (sequences * heads) * size
        rows = q.shape[1]
        if missing := _missing_rows(rows, sequences * heads * keys * dim, q.dtype):
            q = torch.nn.functional.pad(q, (0, 0, 0, missing))
        splits = -(-keys // SPLIT)
        k = kv.keys.view(-1, size, dim).index_select(0, index).view(-1, keys, dim)
        v = kv.values.view(-1, size, dim).index_select(0, index).view(-1, keys // splits, dim)

        scores = torch.bmm(q, k.transpose(1, 2))  # [S * Hkv, R, keys]
        if spec.softcap is not None:
            scores = scores.float().div_(spec.softcap).tanh_().mul_(spec.softcap)
        visible = scores[:, :rows].view(sequences, heads, shared, count, keys)
        visible.masked_fill_(self._hidden(number, group, spec, keys), float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(v.dtype)  # fp32 inside
        if splits > 1:
            weights = weights.view(len(q), -1, splits, SPLIT).transpose(1, 2)
        out = torch.bmm(weights.reshape(len(v), -1, keys // splits), v)
        if splits > 1:
            out = out.view(len(q), splits, -1, dim).sum(1, dtype=torch.float32).to(v.dtype)
        out = out[:, :rows].view(sequences, heads, shared, count, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(sequences * count, spec.num_heads, dim)

    def _index(
        self, number: int, group: QueryGroup, heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[S * Hkv * blocks]: where (sequence, head, block) lies among pieces of [size, D]."""
        index = self._gather_index.get((number, heads))
        if index is None:
            table, per_split = group.tables, SPLIT // self._layout.block_size
            if table.shape[1] > per_split or dtype == torch.float32:
                table = torch.nn.functional.pad(table, (0, -table.shape[1] % per_split))
            head = torch.arange(heads, device=table.device)
            index = (table[:, None] * heads + head[:, None]).flatten()
            self._gather_index[number, heads] = index
        return index

    def _hidden(
        self, number: int, group: QueryGroup, spec: AttentionSpec, num_keys: int
    ) -> torch.Tensor:
        """[S, 1, 1, count, keys]: True where a query must not see a key."""
        cache_key = (number, spec.causal, spec.window)
        mask = self._masks.get(cache_key)
        if mask is None:
            keys = torch.arange(num_keys, device=group.tables.device)
            query = group.positions[:, :, None]
            last = query if spec.causal else group.positions[:, -1:, None]
            mask = keys > last
            if spec.window is not None:
                mask = mask | (keys <= query - spec.window)
            mask = mask[:, None, None]
            self._masks[cache_key] = mask
        return mask


def _missing_rows(rows: int, products_per_row: int, dtype: torch.dtype) -> int:
    """How many rows of padding keep a matmul in the kernel that all other shapes take."""
    if dtype == torch.float32:
        return -rows % ROWS_FP32
    return max(0, SMALL_PRODUCT // products_per_row + 1 - rows)


def _groups(layout: StepLayout) -> list[QueryGroup]:
    """Decodes by similar length, prompt chunks one by one."""
    decodes = next(
        (i for i, count in enumerate(layout.query_lens) if count != 1), len(layout.query_lens)
    )
    groups = _decode_groups(layout, decodes) if decodes else []
    first = decodes
    for index in range(decodes, len(layout.query_lens)):
        count = layout.query_lens[index]
        blocks = -(-layout.seq_lens[index] // layout.block_size)
        groups.append(
            QueryGroup(
                first,
                1,
                count,
                layout.block_tables[index : index + 1, :blocks],
                layout.positions[first : first + count].view(1, count),
            )
        )
        first += count
    return groups


def _decode_groups(layout: StepLayout, decodes: int) -> list[QueryGroup]:
    blocks = [-(-length // layout.block_size) for length in layout.seq_lens[:decodes]]
    longest = max(blocks)
    if longest * decodes <= MAX_PADDING * sum(blocks):
        tables = layout.block_tables[:decodes, :longest]
        return [QueryGroup(0, decodes, 1, tables, layout.positions[:decodes].view(-1, 1))]
    groups: list[QueryGroup] = []
    order = sorted(range(decodes), key=blocks.__getitem__, reverse=True)
    while order:
        longest = blocks[order[0]]
        near = [i for i in order if blocks[i] * MAX_PADDING >= longest]
        order = order[len(near) :]
        index = torch.tensor(near, device=layout.block_tables.device)
        tables = layout.block_tables.index_select(0, index)[:, :longest]
        positions = layout.positions.index_select(0, index).view(-1, 1)
        groups.append(QueryGroup(0, len(near), 1, tables, positions, index))
    return groups
