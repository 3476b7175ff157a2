"""Attention within spans of tokens, without a KV cache: of the patches of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.backend import StepLayout
from engine.attention.spec import AttentionSpec
from engine.ops.kernels import Kernels

if TYPE_CHECKING:
    from engine.attention.numba import NumbaPlan
    from engine.kernels.numba.span_attention import SpanPlan

Attended = Callable[[slice], torch.Tensor]  # of rows: their outputs [rows, H * D]

BLOCK = 16  # of the layout; keys of spans are in blocks of the backend's own size


class Spans:
    """Adjacent spans of tokens, which see the tokens of their span. All layers share one."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._plans: dict[int, SpanPlan] = {}

    def plan(self, heads: int) -> SpanPlan | None:
        """Return the plan of the kernel for bf16, made once for all layers.

        It is None if a span is too long for that.
        """
        from engine.kernels.numba.span_attention import MOST_KEYS, SpanPlan

        if max(self.lengths) > MOST_KEYS:
            return None
        if heads not in self._plans:
            self._plans[heads] = SpanPlan(self.lengths, heads)
        return self._plans[heads]

    @cached_property
    def numba_plan(self) -> NumbaPlan:
        """The plan of Numba's kernels, made once for all layers."""
        from engine.attention.numba import NumbaBackend

        lengths = torch.tensor(self.lengths)
        positions = torch.cat([torch.arange(length) for length in self.lengths])
        layout = StepLayout(
            num_decodes=0,
            query_lens=self.lengths,
            seq_lens=self.lengths,
            lengths=lengths.int(),
            query_starts=F.pad(lengths.cumsum(0).int(), (1, 0)),
            groups=(),
            token_offsets=positions % BLOCK,
            positions=positions,
            block_size=BLOCK,
        )
        return NumbaBackend(positions.device).plan(layout)


class SpanAttention(nn.Module):
    """Multi-head self-attention (arXiv 1706.03762) within spans. It has no weights.

    In bf16 on a core of Zen 4, the kernel for bf16 takes 20 ms for 1024 tokens with 12 heads of 64,
    that of paged attention 34 ms. In fp32 the latter takes as long as torch's.
    """

    def __init__(self, heads: int, head_dim: int, *, scale: float | None = None) -> None:
        """`scale` of the scores is head_dim^-0.5 by default."""
        super().__init__()
        scale = head_dim**-0.5 if scale is None else scale
        self.spec = AttentionSpec(heads, heads, head_dim, scale=scale, kind="full")
        self.kernels: Kernels = "torch"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans
    ) -> torch.Tensor:
        """q, k and v [T, H, D] -> [T, H * D]."""
        return self.begin(q, k, v, spans)(slice(0, len(q)))

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> Attended:
        """Return a function that computes the outputs of some rows of q, k and v [T, H, D].

        The next `begin` with the same spans ends it. Without a kernel that computes some rows, all
        are computed now.
        """
        if self.kernels == "numba" and self._has_kernel(q.dtype):
            plan = spans.plan(self.spec.num_heads)
            if plan is not None:
                plan.pack(k, v)
                return lambda rows: plan.attend(q, rows, self.spec.scale).flatten(1)
        return self._whole(q, k, v, spans).__getitem__

    def _has_kernel(self, dtype: torch.dtype) -> bool:
        from engine.kernels.numba.span_attention import supports

        return supports(dtype, self.spec.head_dim)

    def _whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans
    ) -> torch.Tensor:
        if self.kernels == "numba" and self.spec.head_dim % 8 == 0:
            return spans.numba_plan.attend(self.spec, None, q, k, v).flatten(1)
        parts, first = [], 0
        for length, group in groupby(spans.lengths):
            count = len(list(group))
            rows = slice(first, first + count * length)
            first = rows.stop
            heads = [x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
            out = F.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], scale=self.spec.scale
            )
            parts.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
