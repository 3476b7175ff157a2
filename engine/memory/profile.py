"""What a GPU needs beside weights, rows and KV cache: measured before the KV cache is sized."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.memory.model_plan import ModelPlan
from engine.protocol import Pooling, SamplingParams
from engine.sampling.logprobs import PROMPT_ROWS
from engine.scheduling.step import EncoderInput, NewRow, ScheduledSlice, Step


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes of the largest step at its worst moment, and of all recordings."""

    step: int = 0
    graphs: int = 0


def largest_step(plan: ModelPlan) -> Step:
    """As many sequences and tokens as a step can have, each at the end of its context.

    Every block is the null block: what is computed means nothing, but it takes what a step takes.
    """
    length = plan.max_model_len
    if plan.kind == "encoder":
        texts = max(1, plan.max_num_encoder_tokens // length)
        return Step(encoder_inputs=tuple(_text(n, length, ()) for n in range(texts)))
    budget = plan.max_num_batched_tokens
    rows = min(plan.config.max_num_seqs, budget)
    counts = [min(budget // rows + (row < budget % rows), length) for row in range(rows)]
    slices = [
        ScheduledSlice(row, 0, row, length - count, count, samples=True)
        for row, count in enumerate(counts)
    ]
    slices.sort(key=lambda s: s.count > 1)
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9)
    cross = [number for number, group in enumerate(plan.groups) if group.is_cross]
    source = length if cross else 0
    new_rows = tuple(NewRow(row, (0,), 1, params, source) for row in range(rows))
    texts = max(1, plan.max_num_encoder_tokens // length) if cross else 0
    encoder_inputs = tuple(_text(n, length, cross) for n in range(texts))
    return Step(tuple(slices), new_rows, encoder_inputs=encoder_inputs)


def scoring_step(plan: ModelPlan) -> Step:
    """A chunk as long as can be, of which logprobs are told; its blocks are the null block, too."""
    count = min(plan.max_num_batched_tokens, plan.max_model_len)
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    scores = min(count, PROMPT_ROWS)
    slice_ = ScheduledSlice(0, 0, 0, plan.max_model_len - count, count, False, scores)
    return Step((slice_,), (NewRow(0, (0,), 1, params),))


def _text(number: int, length: int, groups: list[int] | tuple[()]) -> EncoderInput:
    pooling: Pooling | None = None if groups else "mean"
    blocks = tuple((group, (0,) * length) for group in groups)  # no block size is so small
    return EncoderInput(number, (0,) * length, pooling, blocks)


def release() -> None:
    """Give back the memory of what nobody uses any more, also of an engine that was in this process
    before: recordings have kept its cycles from the collector."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def peak_of(compute: Callable[[], object]) -> int:
    """Bytes of GPU memory that `compute` holds at its worst moment."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compute()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kept_by(compute: Callable[[], object]) -> int:
    """Bytes of GPU memory that are gone after `compute`, which may leave something behind."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    compute()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return max(0, free - torch.cuda.mem_get_info()[0])
