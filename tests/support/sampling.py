"""Rows to sample without an engine, and the call into the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.ops.kernels import Kernels
from engine.protocol.generate import SamplingParams
from engine.sampling.logprobs import PendingLogprobs
from engine.sampling.sampler import DrawParams, draw, is_special, sample


@dataclass(frozen=True)
class Row:
    """One row to sample; the next token goes behind its known ones."""

    params: SamplingParams
    tokens: torch.Tensor  # [known] int32
    prompt_length: int

    @property
    def position(self) -> int:
        return self.tokens.shape[0]


def row(
    position: int = 1, *, tokens: list[int] | None = None, prompt: int = 1, **params: Any
) -> Row:
    """Return a row with `tokens`, or with `position` zeros."""
    known = tokens or [0] * position
    sampling = SamplingParams(**({"max_tokens": 64} | params))
    return Row(sampling, torch.tensor(known, dtype=torch.int32), prompt)


def logits_of(vocabulary: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Return random logits [V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, generator=generator) * spread


def params_of(rows: Sequence[Row]) -> DrawParams:
    """Return the rows' parameters as tensors."""
    params = [row.params for row in rows]
    return DrawParams(
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seeds=torch.tensor([p.seed for p in params]),
        positions=torch.tensor([row.position for row in rows]),
    )


def sample_rows(
    logits: torch.Tensor,
    rows: Sequence[Row],
    *,
    kernels: Kernels = "torch",
    static: bool = False,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, PendingLogprobs | None]:
    """Sample all rows through the whole pipeline."""
    special = {index: row.params for index, row in enumerate(rows) if is_special(row.params)}

    def history(index: int) -> tuple[torch.Tensor, int]:
        return rows[index].tokens, rows[index].prompt_length

    draw_rows = partial(draw, rows=params_of(rows), kernels=kernels, static=static)
    return sample(logits, special, history, draw_rows, masks)
