"""Paged attention in plain torch: the reference for every kernel, and the CPU's default.

Sequences of similar shape form a group and are computed together. Whole blocks are gathered, head
by head; blocks before the window are not gathered. The order of a reduction over keys does not
depend on the batch, the padding or the chunk. Together with linear layers that are exact per row
(see layers/linear.py), this makes a token's logits bitwise independent of the rest of its step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.attention.kv_cache import LayerKV
from engine.attention.layout import GroupLayout, StepLayout
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import FUSED_SPLIT, SPLIT, QueryGroup, query_groups
from engine.device.facts import cpu_has_amx, onednn_emulates_bf16, onednn_has_matmul
from engine.ops.relative_bias import relative_buckets

# Some shapes use kernels with a different order of summation; padding rows avoid them.
# fp32: rows that are left after groups of four, in the matmuls and in the sum over splits.
# bf16: torch does not use oneDNN for products of few multiplications. A single row has its own
# kernel in the fused attention, and in matmuls on CPUs whose AVX-512 lacks bf16.
ROWS_FP32 = 4
SMALL_PRODUCT = 16**3
# The fused kernel takes rows in multiples of 32. With heads narrower than 32, even 32 rows would be
# a small product.
FUSED_ROWS, FUSED_HEAD_DIM = 32, 32


class TorchBackend:
    """Supports every AttentionSpec on every device and dtype."""

    name = "torch"
    supports_capture = (
        False  # a captured step gathers whole block tables, so an eager step is faster
    )
    reads_masked_keys = True  # it gathers whole blocks

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, layout: StepLayout) -> TorchPlan:
        return TorchPlan(layout)


class TorchPlan:
    """The query groups, store indices and masks of one step, shared by all layers."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout = layout
        self._query_groups: dict[int, list[QueryGroup]] = {}
        self._attentions: dict[tuple[int, AttentionSpec, int], list[GroupAttention]] = {}
        self._store_index: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if kv is None:
            assert key is not None
            assert value is not None
            kv = self._own_kv(key, value)
        elif key is not None and value is not None:
            self.store(kv, key, value)
        if (groups := self._attentions.get((kv.group, spec, id(bias)))) is None:
            groups = self._prepare(kv, spec, query.dtype, bias)
            self._attentions[kv.group, spec, id(bias)] = groups
        if len(groups) == 1 and groups[0].order is None:
            return groups[0](kv, query)
        result = torch.empty_like(query)
        for group in groups:
            group.attend(kv, query, result)
        return result

    def _prepare(
        self, kv: LayerKV, spec: AttentionSpec, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> list[GroupAttention]:
        if (groups := self._query_groups.get(kv.group)) is None:
            groups = query_groups(self.layout, self.layout.groups[kv.group])
            self._query_groups[kv.group] = groups
        device, size = self.layout.positions.device, kv.keys.shape[2]
        kind = FusedAttention if FusedAttention.honours(spec, dtype, device) else MatmulAttention
        return [kind(group, spec, size, dtype, bias) for group in groups]

    def _own_kv(self, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        """Return the step's own keys and values as blocks of one token, after a null block."""
        own = len(self.layout.groups)
        if own not in self._query_groups:
            self._query_groups[own] = _whole_sequences(self.layout)
        keys, values = (F.pad(each, (0, 0, 0, 0, 1, 0)).unsqueeze(2) for each in (key, value))
        return LayerKV(keys, values, own)

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        if (index := self._store_index.get((kv.group, key.shape[1]))) is None:
            blocks, offsets = self.layout.slots(kv.group)
            heads = torch.arange(key.shape[1], device=key.device)
            index = torch.broadcast_tensors(blocks[:, None], heads, offsets[:, None])
            index = tuple(part.contiguous() for part in index)
            self._store_index[kv.group, key.shape[1]] = index
        kv.keys.index_put_(index, key)
        kv.values.index_put_(index, value)


class GroupAttention(ABC):
    """Attention of one query group in all layers with the same spec.

    The constructor prepares the state that these layers share. The query heads that share a KV head
    become rows of one matmul. There are N = sequences * KV heads matmuls, each of
    R = query heads per KV head * count rows.
    """

    def __init__(
        self, group: QueryGroup, spec: AttentionSpec, block_size: int, dtype: torch.dtype
    ) -> None:
        heads, dim, table = spec.num_kv_heads, spec.head_dim, group.tables
        shared = spec.num_heads // heads
        self.order = group.order
        self.tokens = slice(group.first, group.first + group.sequences * group.count)
        self._shape = group.sequences, group.count, heads, shared, dim
        self._rows = group.sequences * heads, shared * group.count, dim
        head = torch.arange(heads, device=table.device)
        # Index of each (sequence, head, block) among the [block_size, D] pieces of the cache.
        self._index = (table[:, None] * heads + head[:, None]).flatten()
        self._num_keys = table.shape[1] * block_size
        self._pieces = torch.empty(
            len(self._index), block_size, dim, dtype=dtype, device=table.device
        )
        self._padding = 0  # rows

    def attend(self, kv: LayerKV, query: torch.Tensor, result: torch.Tensor) -> None:
        """Compute the group's tokens from `query` and write them to `result`, both [T, H, D]."""
        if self.order is None:
            result[self.tokens] = self(kv, query)
        else:
            result.index_copy_(0, self.order, self(kv, query))

    def __call__(self, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        """Return the outputs [S * count, H, D] for the queries [T, H, D]."""
        sequences, count, heads, shared, dim = self._shape
        rows = query[self.tokens] if self.order is None else query.index_select(0, self.order)
        q = rows.view(self._shape).permute(0, 2, 3, 1, 4).reshape(self._rows)
        if self._padding:
            q = F.pad(q, (0, 0, 0, self._padding))
        out = self._attend(kv, q)[:, : self._rows[1]]
        out = out.view(sequences, heads, shared, count, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, heads * shared, dim)

    @abstractmethod
    def _attend(self, kv: LayerKV, q: torch.Tensor) -> torch.Tensor:
        """Return the outputs [N, R, D] for the queries [N, R, D]; R includes the padding rows."""

    def _gather(self, blocks: torch.Tensor, pieces: torch.Tensor) -> None:
        torch.index_select(blocks.view(-1, *pieces.shape[1:]), 0, self._index, out=pieces)


class FusedAttention(GroupAttention):
    """Attention with torch's fused CPU kernel, which does not store the scores.

    In bf16 on a CPU with AMX, a row's bits do not depend on the other rows or on masked keys. On
    other CPUs they do: the kernel uses MKL there, whose order of summation depends on the number of
    keys. There it is also slower than oneDNN's matmuls.
    """

    @staticmethod
    def honours(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        wide = spec.head_dim >= FUSED_HEAD_DIM
        bf16 = dtype == torch.bfloat16 and onednn_has_matmul(device, dtype)
        return bf16 and cpu_has_amx() and not spec.softcap and wide

    def __init__(
        self,
        group: QueryGroup,
        spec: AttentionSpec,
        block_size: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(group, spec, block_size, dtype)
        sequences, heads = group.sequences, spec.num_kv_heads
        self._value_pieces = torch.empty_like(self._pieces)
        self._keys = self._pieces.view(sequences, heads, self._num_keys, -1)
        self._values = self._value_pieces.view_as(self._keys)
        self._scale = spec.scale
        (_, rows, dim), num_keys = self._rows, self._num_keys
        last = num_keys % FUSED_SPLIT or min(num_keys, FUSED_SPLIT)
        left = rows % FUSED_ROWS or FUSED_ROWS
        self._padding = _missing_rows(left, last * dim, dtype, fewest=2)
        mask = _mask(group, spec, num_keys, dtype, bias)
        if mask.shape[1] == 1:  # the same for all heads
            mask = mask.expand(-1, spec.num_heads // heads, -1, -1)
        mask = mask.reshape(sequences, -1, rows, num_keys)
        self._mask = F.pad(mask, (0, 0, 0, self._padding))

    def _attend(self, kv: LayerKV, q: torch.Tensor) -> torch.Tensor:
        self._gather(kv.keys, self._pieces)
        self._gather(kv.values, self._value_pieces)
        return F.scaled_dot_product_attention(
            q.view(*self._keys.shape[:2], *q.shape[1:]),
            self._keys,
            self._values,
            attn_mask=self._mask,
            scale=self._scale,
        ).flatten(0, 1)


class MatmulAttention(GroupAttention):
    """Matmul, softmax, matmul, in any dtype and with an optional softcap.

    Weighted values are summed in splits of 256 keys. So the order of the reduction over keys does
    not depend on the batch, the padding or the chunk.
    """

    def __init__(
        self,
        group: QueryGroup,
        spec: AttentionSpec,
        block_size: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        per_split = SPLIT // block_size
        if group.tables.shape[1] > per_split or dtype == torch.float32:
            missing = -group.tables.shape[1] % per_split
            tables = F.pad(group.tables, (0, missing))
            group = replace(group, tables=tables)
        super().__init__(group, spec, block_size, dtype)
        (matmuls, rows, dim), num_keys = self._rows, self._num_keys
        self._spec, self._windowed = spec, group.first_keys is not None
        self._splits = -(-num_keys // SPLIT)
        self._keys = self._pieces.view(matmuls, num_keys, dim).transpose(1, 2)
        # Values reuse the keys' buffer: they are gathered once the scores are computed.
        self._values = self._pieces.view(matmuls * self._splits, -1, dim)
        fewest = 2 if onednn_emulates_bf16(group.tables.device, dtype) else 1
        self._padding = _missing_rows(rows, matmuls * num_keys * dim, dtype, fewest)
        mask = _mask(group, spec, num_keys, dtype, bias).expand(-1, spec.num_heads, -1, -1)
        mask = mask.reshape(matmuls, rows, num_keys)
        self._mask = F.pad(mask, (0, 0, 0, self._padding))

    def _attend(self, kv: LayerKV, q: torch.Tensor) -> torch.Tensor:
        spec, splits, dim = self._spec, self._splits, self._rows[-1]
        self._gather(kv.keys, self._pieces)
        if spec.softcap is None:
            scores = torch.baddbmm(self._mask, q, self._keys, alpha=spec.scale)
        else:
            scores = torch.bmm(q, self._keys).float().mul_(spec.scale / spec.softcap)
            scores.tanh_().mul_(spec.softcap).add_(self._mask)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)  # fp32 inside
        if splits > 1:
            weights = weights.view(*q.shape[:2], splits, SPLIT).transpose(1, 2)
            weights = weights.reshape(-1, q.shape[1], SPLIT)
        self._gather(kv.values, self._pieces)
        out = torch.bmm(weights, self._values)
        if splits > 1:
            out = _sum_splits(out.view(q.shape[0], splits, -1, dim), self._windowed)
        return out


def _mask(
    group: QueryGroup,
    spec: AttentionSpec,
    num_keys: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the additive mask [S, H or 1, count, keys].

    It is minus infinity where a query must not see a key, and the relative bias or 0 elsewhere.
    """
    keys, query = torch.arange(num_keys, device=group.tables.device), group.positions[:, :, None]
    if group.first_keys is not None:
        keys = keys + group.first_keys[:, None, None]
    last = query if spec.kind == "causal" else group.last_keys[:, None, None].expand_as(query)
    hidden = keys > last
    if spec.window is not None:
        hidden = hidden | (keys <= query - spec.window)
    if (relative := spec.relative) is None:
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]
    assert bias is not None
    buckets = relative_buckets(
        keys - query, relative.num_buckets, relative.max_distance, relative.bidirectional
    )
    return bias[buckets].permute(0, 3, 1, 2).masked_fill(hidden[:, None], float("-inf"))


def _missing_rows(rows: int, products_per_row: int, dtype: torch.dtype, fewest: int) -> int:
    """Return the number of padding rows that make a matmul use the kernel of all other shapes."""
    if dtype == torch.float32:
        return -rows % ROWS_FP32
    return max(0, fewest - rows, SMALL_PRODUCT // products_per_row + 1 - rows)


def _sum_splits(parts: torch.Tensor, windowed: bool) -> torch.Tensor:
    """Sum [N, splits, R, D] over the splits in fp32; return [N, R, D].

    With a window, the number of leading splits in which a query sees no key differs between steps.
    Splits are then added one by one, so that the zeros of those splits change no bit.
    """
    if not windowed:
        return parts.sum(1, dtype=torch.float32).to(parts.dtype)
    total = parts[:, 0].float()
    for split in range(1, parts.shape[1]):
        total = total + parts[:, split]
    return total.to(parts.dtype)


def _whole_sequences(layout: StepLayout) -> list[QueryGroup]:
    """Return the groups of an encoder's step, whose sequences attend to their own tokens only.

    Sequences are grouped as if they had blocks. The entries of the resulting tables are tokens,
    counted from 1; entry 0 stands for no token.
    """
    assert layout.query_lens is not None, "an encoder's step is never captured"
    assert layout.seq_lens is not None
    assert list(layout.query_lens) == list(layout.seq_lens), "an encoder step must hold whole texts"
    device, size, lengths = layout.positions.device, layout.block_size, layout.lengths
    ends = (-(-lengths // size)).cumsum(0)
    firsts = 1 + torch.cat([ends.new_zeros(1), ends[:-1]])
    tables = firsts[:, None] + torch.arange(-(-max(layout.seq_lens) // size), device=device)
    tables = tables.where(tables <= ends[:, None], 0)
    blocks = firsts.repeat_interleave(lengths) + layout.positions // size
    tokens = blocks.new_zeros(int(ends[-1]) + 1, size)
    tokens[blocks, layout.token_offsets] = torch.arange(1, len(blocks) + 1, device=device)
    groups = query_groups(layout, GroupLayout(tables, blocks))
    return [replace(group, tables=tokens[group.tables].flatten(1)) for group in groups]
