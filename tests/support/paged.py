"""Attention steps over a paged KV cache without a model, and dense attention as the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.kv_cache import KVCache
from engine.attention.spec import AttentionSpec
from engine.attention.torch.backend import TorchBackend

Part = tuple[int, int, int]  # (sequence, first position, count) computed in a step


@dataclass(frozen=True)
class Sequences:
    """Queries, keys and values of whole sequences, [length, heads, head_dim] each."""

    spec: AttentionSpec
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    sinks: torch.Tensor | None = None  # [heads]
    image: tuple[int, int] = (0, 0)  # tokens [first, end) of each that see each other both ways

    def last_key(self, position: int) -> int:
        """Return the last key that a token sees in a causal layer."""
        first, end = self.image
        return end - 1 if first <= position < end else position

    @property
    def lengths(self) -> list[int]:
        return [len(query) for query in self.queries]


def random_sequences(
    spec: AttentionSpec, lengths: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Sequences:
    """Return random sequences; scores have a standard deviation of about 2 at the usual scale."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> list[torch.Tensor]:
        shapes = [(length, heads, spec.head_dim) for length in lengths]
        return [(torch.randn(s, generator=generator) * 1.4).to(dtype) for s in shapes]

    queries, keys, values = (
        draw(heads) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    if spec.value_dim is not None:
        values = [key[..., : spec.value_dim] for key in keys]
    sinks = None
    if spec.has_sinks:
        sinks = (torch.randn(spec.num_heads, generator=generator) * 2 + 2).to(dtype)
    return Sequences(spec, queries, keys, values, sinks)


class PagedRun:
    """Sequences in scattered blocks of one cache. Blocks that no sequence owns hold NaN."""

    def __init__(
        self,
        sequences: Sequences,
        block_size: int,
        *,
        backend: AttentionBackend | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.sequences, self.block_size = sequences, block_size
        self.backend = backend or TorchBackend()
        needed = [-(-length // block_size) for length in sequences.lengths]
        ids = list(range(1, sum(needed) + 4))
        random.Random(0).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        self.unowned = ids
        dtype = kv_dtype or sequences.queries[0].dtype
        self.cache = KVCache(
            [sequences.spec], sum(needed) + 3, block_size, dtype, torch.device("cpu")
        )
        kv = self.cache.layers[0]
        for blocks, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
            poisoned = blocks if scales is None else scales
            if poisoned is not None:
                poisoned[self.unowned] = float("nan")
        width = sequences.spec.result_dim
        self.outputs = [
            torch.full_like(query[..., :width], float("nan")) for query in sequences.queries
        ]

    def _seen(self, index: int, start: int) -> list[int]:
        """Return the block table of a sequence, with unowned blocks before the window."""
        window = self.sequences.spec.window
        gone = max(0, start - window + 1) // self.block_size if window else 0
        return self.unowned[:1] * gone + self.tables[index][gone:]

    def layout(self, parts: Sequence[Part]) -> StepLayout:
        size = self.block_size
        places = [(i, p) for i, start, count in parts for p in range(start, start + count)]
        width = max(-(-(start + count) // size) for _, start, count in parts)
        rows = [(self._seen(i, start) + [0] * width)[:width] for i, start, _ in parts]
        positions = torch.tensor([p for _, p in places])
        counts = [count for _, _, count in parts]
        lengths = [start + count for _, start, count in parts]
        last_keys = None
        if any(self.sequences.image):
            last_keys = torch.tensor([self.sequences.last_key(p) for _, p in places])
        return StepLayout(
            num_decodes=len(list(takewhile(lambda count: count == 1, counts))),
            query_lens=counts,
            seq_lens=lengths,
            lengths=torch.tensor(lengths, dtype=torch.int32),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            groups=[
                GroupLayout(
                    torch.tensor(rows),
                    torch.tensor([self.tables[i][p // size] for i, p in places]),
                    self.sequences.spec.window,
                )
            ],
            token_offsets=positions % size,
            positions=positions,
            block_size=size,
            last_keys=last_keys,
        )

    def step(self, parts: Sequence[Part]) -> None:
        """Compute these parts in one step, decodes first, and store the outputs."""
        parts = sorted(parts, key=lambda part: part[2] > 1)
        s = self.sequences

        def gathered(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([tensors[i][start : start + count] for i, start, count in parts])

        plan = self.backend.plan(self.layout(parts))
        kv = self.cache.layers[0]
        value = None if s.spec.value_dim is not None else gathered(s.values)
        arguments = gathered(s.queries), gathered(s.keys), value
        result = plan.attend(s.spec, kv, *arguments, sinks=s.sinks)
        for (i, start, count), part in zip(parts, result.split([p[2] for p in parts]), strict=True):
            self.outputs[i][start : start + count] = part

    def whole(self) -> list[torch.Tensor]:
        self.step([(i, 0, length) for i, length in enumerate(self.sequences.lengths)])
        return self.outputs

    def chunked(self, size: int) -> list[torch.Tensor]:
        """Compute all sequences together, `size` tokens of each per step; return the outputs."""
        lengths = self.sequences.lengths
        for start in range(0, max(lengths), size):
            self.step(
                [(i, start, min(size, n - start)) for i, n in enumerate(lengths) if start < n]
            )
        return self.outputs


def dense(sequences: Sequences, *, seen: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Compute attention by its definition in fp64, query by query.

    `seen` is the number of keys of each sequence, for attention that is not causal.
    """
    spec, results = sequences.spec, []
    shared = spec.num_heads // spec.num_kv_heads
    for index, (q, k, v) in enumerate(
        zip(sequences.queries, sequences.keys, sequences.values, strict=True)
    ):
        q, k, v = q.double(), k.double(), v.double()
        out = torch.zeros_like(q[..., : v.shape[-1]])
        for position in range(len(q)):
            last = sequences.last_key(position) if spec.sees_whole_images else position
            if spec.kind != "causal":
                last = (seen[index] if seen else len(k)) - 1
            first = max(0, position - spec.window + 1) if spec.window else 0
            if spec.window and spec.kind == "full":
                last = min(last, position + spec.window - 1)
            for head in range(spec.num_heads):
                scores = k[first : last + 1, head // shared] @ q[position, head] * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                if sequences.sinks is not None:
                    scores = torch.cat((scores, sequences.sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: last + 1 - first]
                out[position, head] = weights @ v[first : last + 1, head // shared]
        results.append(out)
    return results
