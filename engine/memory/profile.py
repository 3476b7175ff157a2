"""Memory of steps and graphs on a GPU, measured before the KV cache is sized."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from engine.memory.graph_shapes import GraphShape, decode_sizes, with_variants
from engine.memory.model_plan import ModelPlan
from engine.protocol.generate import SamplingParams
from engine.sampling.logprobs import PROMPT_ROWS
from engine.scheduling.step import EncoderInput, NewRow, ScheduledSlice, Step

Capture = Callable[[GraphShape], None]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Bytes of GPU memory: of the largest step at its worst moment, and of all captured graphs."""

    step_bytes: int = 0
    graph_bytes: int = 0


def profile_steps(
    plan: ModelPlan, compute: Callable[[Step], object], capturing: Callable[[], Capture] | None
) -> StepProfile:
    """Compute the largest step, and capture the largest graphs of each kind.

    `compute` runs a step to its end. `capturing` makes the graphs' buffers and returns the function
    that captures a shape; None if nothing will be captured. The caller throws these graphs away: a
    graph holds the addresses of its KV cache, whose size depends on what the graphs leave.

    Raises ConfigError if the largest step does not fit.
    """
    try:
        step = peak_of(lambda: compute(largest_step(plan)))
        if plan.kind == "decoder":
            step = max(step, peak_of(lambda: compute(prompt_logprobs_step(plan))))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The largest step does not fit into the GPU memory that the weights leave. Lower "
            "--max-num-batched-tokens, --max-num-encoder-tokens, --max-num-seqs or "
            "--max-model-len."
        ) from error
    if capturing is None:
        return StepProfile(step)
    made: list[Capture] = []
    graphs = kept_by(lambda: made.append(capturing()))
    [capture] = made
    decodes = [GraphShape(size) for size in decode_sizes(plan.config.max_num_seqs)]
    for plain in (decodes, plan.mixed_graph_shapes):
        shapes = with_variants(plain, has_adapters=plan.adapters is not None)
        shapes.sort(key=lambda shape: shape.has_adapters)  # they take the most memory
        if shapes:
            # Filled up to its shape, a captured step may have more tokens than any other step.
            kept, peak = _capture_largest(capture, shapes)
            graphs += kept
            step = max(step, peak)
    return StepProfile(step, graphs)


def _capture_largest(capture: Capture, shapes: Sequence[GraphShape]) -> tuple[int, int]:
    """Return the bytes that all `shapes` will keep, and the peak while the largest is captured.

    The largest fills the graphs' memory pool. The next one tells what each further one keeps.
    """
    *others, largest = shapes
    peaks: list[int] = []
    kept = kept_by(lambda: peaks.append(peak_of(lambda: capture(largest))))
    if others:
        kept += len(others) * kept_by(lambda: capture(others[-1]))
    return kept, peaks[0]


def largest_step(plan: ModelPlan) -> Step:
    """Return a step of as many sequences and tokens as possible, each at the end of its context.

    Every block is the null block: the results mean nothing, but the step takes the memory.
    """
    if plan.kind == "encoder":
        return Step(encoder_inputs=_longest_texts(plan, ()))
    slices = _longest_slices(plan)
    cross = [number for number, group in enumerate(plan.kv_groups) if group.is_cross]
    encoder_length = 0
    texts: tuple[EncoderInput, ...] = ()
    if cross:
        encoder_length = plan.max_model_len
        texts = _longest_texts(plan, cross)
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9)
    new_rows = [NewRow(row, (0,), 1, params, encoder_length) for row in range(len(slices))]
    return Step(tuple(slices), tuple(new_rows), encoder_inputs=texts)


def _longest_slices(plan: ModelPlan) -> list[ScheduledSlice]:
    """Share the token budget among as many sequences as possible, decodes first."""
    length = plan.max_model_len
    budget = plan.max_num_batched_tokens
    rows = min(plan.config.max_num_seqs, budget)
    share, rest = divmod(budget, rows)
    slices = []
    for row in range(rows):
        count = share
        if row < rest:
            count += 1
        count = min(count, length)
        slices.append(ScheduledSlice(row, 0, row, length - count, count, samples=True))
    return sorted(slices, key=lambda s: s.count > 1)


def prompt_logprobs_step(plan: ModelPlan) -> Step:
    """Return the longest possible chunk with prompt logprobs; every block is the null block."""
    count = min(plan.max_num_batched_tokens, plan.max_model_len)
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    wanted = min(count, PROMPT_ROWS)
    chunk = ScheduledSlice(0, 0, 0, plan.max_model_len - count, count, False, wanted)
    return Step((chunk,), (NewRow(0, (0,), 1, params),))


def _longest_texts(plan: ModelPlan, cross_groups: Sequence[int]) -> tuple[EncoderInput, ...]:
    """Return as many of the longest texts as a step encodes, with their KV in `cross_groups`."""
    length = plan.max_model_len
    zeros = (0,) * length
    is_pooled = not cross_groups
    blocks = tuple((group, zeros) for group in cross_groups)  # more than any block size needs
    texts = max(1, plan.max_num_encoder_tokens // length)
    return tuple(EncoderInput(number, zeros, blocks, is_pooled) for number in range(texts))


def release_memory() -> None:
    """Give back the memory of objects that are no longer used.

    That includes an earlier engine of this process: capturing freezes its reference cycles.
    """
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def peak_of(compute: Callable[[], object]) -> int:
    """Bytes of GPU memory that `compute` holds at its worst moment.

    The allocator takes whole segments from the device, so it holds more than what is allocated.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    compute()
    torch.cuda.synchronize()
    return max(
        torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved
    )


def kept_by(compute: Callable[[], object]) -> int:
    """Bytes of GPU memory that are gone after `compute`, which may leave something behind."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    compute()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return max(0, free - torch.cuda.mem_get_info()[0])
