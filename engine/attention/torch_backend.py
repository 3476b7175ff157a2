"""Paged attention in plain torch: the reference for every kernel, and the CPU's own path.

Sequences with equally many new tokens form a group and are computed together. Their blocks are
gathered whole, head by head; weighted values are summed over splits of 256 keys, so the reduction
over keys has the same order whatever the batch, the padding or the chunk. With row-wise exact
linears (see layers/linear.py) this makes a token's logits independent of what shares its step, bit
by bit. Behind a window nothing is gathered; splits still begin at multiples of 256 keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import GroupLayout, StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.ops.relative import relative_buckets

SPLIT = 256  # keys; below it, oneDNN's bf16 matmul reduces fewer keys as if zeros followed
# Rows left over by fours take fp32 kernels with another order of summation, in the matmuls and in
# the sum over splits; bf16 products of few multiplications are not given to oneDNN at all.
ROWS_FP32 = 4
SMALL_PRODUCT = 16**3
# A group is cut where padding short sequences to its longest would more than double the work.
MAX_PADDING = 2

# Of one sequence: the blocks [first, end) that are gathered, of which queries see those from `seen`
# on, and its last key.
Reach = tuple[int, int, int, int]  # first, seen, end, last key


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """`sequences` neighbours with `count` new tokens each, beginning at token `first`."""

    first: int
    sequences: int
    count: int
    positions: torch.Tensor  # [sequences, count] of the queries
    tables: torch.Tensor  # [sequences, blocks]
    first_keys: torch.Tensor | None  # [sequences] where each table begins; None: all at key 0
    last_keys: torch.Tensor  # [sequences] the last key there is
    order: torch.Tensor | None = None  # [sequences] token indices, where they are no neighbours


class TorchBackend:
    """Honours every AttentionSpec on every device and dtype."""

    name = "torch"
    captures = False  # it gathers whole tables: an eager step is faster
    reads_masked = True  # blocks are gathered whole

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, layout: StepLayout) -> TorchPlan:
        return TorchPlan(layout)


class TorchPlan:
    """Groups, store index and masks of one step, shared by all layers."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._kv = list(layout.groups)
        self._query_groups: dict[int, list[QueryGroup]] = {}
        self._scratch: dict[tuple[int, int], LayerKV] = {}
        self._store_index: dict[tuple[int, int], torch.Tensor] = {}
        self._gather_index: dict[tuple[int, int, int], torch.Tensor] = {}
        self._masks: dict[tuple[int, int, str, int | None], torch.Tensor] = {}
        self._biases: dict[tuple[int, int, int], torch.Tensor] = {}

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv = kv or self._step_kv(spec, query)
        if key is not None and value is not None:
            self.store(kv, key, value)
        if (groups := self._query_groups.get(kv.group)) is None:
            groups = self._query_groups[kv.group] = _query_groups(self._layout, self._kv[kv.group])
        outputs = [self._attend_group(i, g, spec, kv, query, bias) for i, g in enumerate(groups)]
        if len(outputs) == 1 and groups[0].order is None:
            return outputs[0]
        result = torch.empty_like(query)
        for group, output in zip(groups, outputs, strict=True):
            if group.order is None:
                result[group.first : group.first + len(output)] = output
            else:
                result.index_copy_(0, group.order, output)
        return result

    def _step_kv(self, spec: AttentionSpec, like: torch.Tensor) -> LayerKV:
        """Blocks for this step alone: whole sequences without KV attend by the same code."""
        shape = spec.num_kv_heads, self._layout.block_size, spec.head_dim
        if (kv := self._scratch.get(shape[::2])) is None:
            group, blocks = _whole_sequences(self._layout)
            self._kv.append(group)
            keys, values = (like.new_zeros(blocks + 1, *shape) for _ in range(2))
            kv = self._scratch[shape[::2]] = LayerKV(keys, values, len(self._kv) - 1)
        return kv

    def slots(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv[kv.group].token_blocks, self._layout.token_offsets

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        _, heads, block_size, dim = kv.keys.shape
        index = self._store_index.get((kv.group, heads))
        if index is None:  # [T * heads]: where (token, head) lies in the cache seen as rows of dim
            head = torch.arange(heads, device=key.device)
            blocks = self._kv[kv.group].token_blocks
            rows = blocks[:, None] * heads + head
            index = (rows * block_size + self._layout.token_offsets[:, None]).flatten()
            self._store_index[kv.group, heads] = index
        kv.keys.view(-1, dim).index_copy_(0, index, key.reshape(-1, dim))
        kv.values.view(-1, dim).index_copy_(0, index, value.reshape(-1, dim))

    def _attend_group(
        self,
        number: int,
        group: QueryGroup,
        spec: AttentionSpec,
        kv: LayerKV,
        query: torch.Tensor,
        bias: torch.Tensor | None,
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
        index = self._index((kv.group, number, heads), group, query.dtype)
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
        if spec.relative is not None:
            assert bias is not None
            cache_key = kv.group, number, id(bias)
            visible += self._bias(cache_key, spec.relative, group, keys, bias).view_as(visible)
        hidden = self._hidden((kv.group, number, spec.kind, spec.window), group, keys)
        visible.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(v.dtype)  # fp32 inside
        if splits > 1:
            weights = weights.view(len(q), -1, splits, SPLIT).transpose(1, 2)
        out = torch.bmm(weights.reshape(len(v), -1, keys // splits), v)
        if splits > 1:
            out = _sum_splits(out.view(len(q), splits, -1, dim), group.first_keys is not None)
        out = out[:, :rows].view(sequences, heads, shared, count, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(sequences * count, spec.num_heads, dim)

    def _index(
        self, cache_key: tuple[int, int, int], group: QueryGroup, dtype: torch.dtype
    ) -> torch.Tensor:
        """[S * Hkv * blocks]: where (sequence, head, block) lies among pieces of [size, D]."""
        index, heads = self._gather_index.get(cache_key), cache_key[-1]
        if index is None:
            table, per_split = group.tables, SPLIT // self._layout.block_size
            if table.shape[1] > per_split or dtype == torch.float32:
                table = torch.nn.functional.pad(table, (0, -table.shape[1] % per_split))
            head = torch.arange(heads, device=table.device)
            index = (table[:, None] * heads + head[:, None]).flatten()
            self._gather_index[cache_key] = index
        return index

    def _bias(
        self,
        cache_key: tuple[int, int, int],
        relative: RelativeBias,
        group: QueryGroup,
        num_keys: int,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """[S, H, count, keys]: what the table [buckets, H] adds to the scores."""
        bias = self._biases.get(cache_key)
        if bias is None:
            keys = torch.arange(num_keys, device=group.tables.device)
            distance = keys - group.positions[:, :, None]
            buckets = relative_buckets(
                distance, relative.num_buckets, relative.max_distance, relative.bidirectional
            )
            bias = table[buckets].permute(0, 3, 1, 2).contiguous()
            self._biases[cache_key] = bias
        return bias

    def _hidden(
        self, cache_key: tuple[int, int, str, int | None], group: QueryGroup, num_keys: int
    ) -> torch.Tensor:
        """[S, 1, 1, count, keys]: True where a query must not see a key."""
        mask, (_, _, kind, window) = self._masks.get(cache_key), cache_key
        if mask is None:
            keys = torch.arange(num_keys, device=group.tables.device)
            if group.first_keys is not None:
                keys = keys + group.first_keys[:, None, None]
            query = group.positions[:, :, None]
            mask = keys > (query if kind == "causal" else group.last_keys[:, None, None])
            if window is not None:
                mask = mask | (keys <= query - window)
            mask = mask[:, None, None]
            self._masks[cache_key] = mask
        return mask


def _missing_rows(rows: int, products_per_row: int, dtype: torch.dtype) -> int:
    """How many rows of padding keep a matmul in the kernel that all other shapes take."""
    if dtype == torch.float32:
        return -rows % ROWS_FP32
    return max(0, SMALL_PRODUCT // products_per_row + 1 - rows)


def _sum_splits(parts: torch.Tensor, windowed: bool) -> torch.Tensor:
    """[N, splits, R, D] -> [N, R, D], summed in fp32.

    Behind a window how many splits come first differs from step to step; added one by one, the
    zeros of those in which a query sees nothing change no bit.
    """
    if not windowed:
        return parts.sum(1, dtype=torch.float32).to(parts.dtype)
    total = parts[:, 0].float()
    for split in range(1, parts.shape[1]):
        total = total + parts[:, split]
    return total.to(parts.dtype)


def _query_groups(layout: StepLayout, kv: GroupLayout) -> list[QueryGroup]:
    """Decodes by similar length, chunks one by one or with neighbours that are just alike."""
    if layout.query_lens is None:
        return [_captured_group(layout, kv)]
    counts, decodes = layout.query_lens, layout.num_decodes
    reach = _reach(layout, kv)
    groups = _decode_groups(layout, kv, reach[:decodes]) if decodes else []
    first = index = decodes
    while index < len(counts):
        count, end = counts[index], index + 1
        while end < len(counts) and counts[end] == count and reach[end] == reach[index]:
            end += 1
        positions = layout.positions[first : first + (end - index) * count].view(-1, count)
        tables = _tables(layout, kv, slice(index, end), reach[index:end])
        groups.append(QueryGroup(first, end - index, count, positions, *tables))
        first, index = first + (end - index) * count, end
    return groups


def _whole_sequences(layout: StepLayout) -> tuple[GroupLayout, int]:
    """Blocks 1, 2, ... for all keys of the step's sequences, and how many these are."""
    assert layout.query_lens is not None, "an encoder's step is never captured"
    assert layout.seq_lens is not None
    assert list(layout.query_lens) == list(layout.seq_lens), "an encoder reads a text at once"
    device, size, lengths = layout.positions.device, layout.block_size, layout.lengths
    ends = (-(-lengths // size)).cumsum(0)
    firsts = 1 + torch.cat([ends.new_zeros(1), ends[:-1]])
    tables = firsts[:, None] + torch.arange(-(-max(layout.seq_lens) // size), device=device)
    tables = tables.where(tables <= ends[:, None], 0)
    token_blocks = firsts.repeat_interleave(lengths) + layout.positions // size
    return GroupLayout(tables, token_blocks), int(ends[-1])


def _captured_group(layout: StepLayout, kv: GroupLayout) -> QueryGroup:
    """Every token alone against its sequence's whole table: nothing here depends on the host."""
    positions, tables = layout.positions[:, None], kv.block_tables
    last = (layout.lengths if kv.key_lengths is None else kv.key_lengths) - 1
    if layout.num_decodes < len(tables):
        tokens = torch.arange(len(positions), dtype=torch.int32, device=tables.device)
        owners = torch.searchsorted(layout.query_starts[1:], tokens, right=True)
        owners.clamp_(max=len(tables) - 1)
        tables, last = tables.index_select(0, owners), last.index_select(0, owners)
    if kv.window is None:
        return QueryGroup(0, len(tables), 1, positions, tables, None, last)
    # What lies behind the window may be another's by now: NaN there would pass the mask.
    seen = (positions - kv.window + 1).clamp(min=0) // layout.block_size
    entries = torch.arange(tables.shape[1], device=tables.device)
    tables = tables.where(entries >= seen, 0)
    return QueryGroup(0, len(tables), 1, positions, tables, torch.zeros_like(last), last)


def _reach(layout: StepLayout, kv: GroupLayout) -> list[Reach]:
    size, window, lengths = layout.block_size, kv.window, kv.key_lens or layout.seq_lens
    assert lengths is not None
    assert layout.query_lens is not None
    reach = []
    for count, length in zip(layout.query_lens, lengths, strict=True):
        seen = 0 if window is None else max(0, length - count - window + 1)
        reach.append((seen // SPLIT * SPLIT // size, seen // size, -(-length // size), length - 1))
    return reach


def _decode_groups(layout: StepLayout, kv: GroupLayout, reach: list[Reach]) -> list[QueryGroup]:
    blocks = [end - first for first, _, end, _ in reach]
    if max(blocks) * len(blocks) <= MAX_PADDING * sum(blocks):
        everyone = slice(0, len(blocks))
        positions = layout.positions[everyone].view(-1, 1)
        tables = _tables(layout, kv, everyone, reach)
        return [QueryGroup(0, len(blocks), 1, positions, *tables)]
    groups: list[QueryGroup] = []
    order = sorted(range(len(blocks)), key=blocks.__getitem__, reverse=True)
    while order:
        longest = blocks[order[0]]
        near = [i for i in order if blocks[i] * MAX_PADDING >= longest]
        order = order[len(near) :]
        index = torch.tensor(near, device=layout.positions.device)
        positions = layout.positions.index_select(0, index).view(-1, 1)
        tables = _tables(layout, kv, index, [reach[i] for i in near])
        groups.append(QueryGroup(0, len(near), 1, positions, *tables, index))
    return groups


def _tables(
    layout: StepLayout, kv: GroupLayout, members: slice | torch.Tensor, reach: list[Reach]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The members' tables as far as their queries look, and each one's first and last key."""
    tables, width = kv.block_tables[members], max(end - first for first, _, end, _ in reach)
    first, seen, end, last = torch.tensor(reach, device=tables.device).T
    if kv.window is None:
        return tables[:, :width], None, last
    entries = first[:, None] + torch.arange(width, device=tables.device)
    visible = (entries >= seen[:, None]) & (entries < end[:, None])
    tables = tables.gather(1, entries.clamp(max=tables.shape[1] - 1))
    return tables.where(visible, 0), first * layout.block_size, last
