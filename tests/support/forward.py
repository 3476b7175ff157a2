"""Run a loaded model on slices built by hand, which gives the logits of all tokens.

The engine itself computes logits of sampled tokens only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.layers.attention import kv_specs
from engine.protocol.generate import Image, SamplingParams
from engine.runner.batch import build_batch
from engine.runner.encoder import build_encoder_batch
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import (
    EncoderInput,
    NewBlocks,
    NewRow,
    ScheduledSlice,
    Step,
)

Plan = list[list[tuple[int, int]]]  # steps of (prompt index, number of its next tokens)


@torch.inference_mode()
def forward(
    runner: ModelRunner,
    prompts: Sequence[list[int]],
    plan: Plan,
    sources: Sequence[list[int]] | None = None,
    prepare: Callable[[Step, ForwardBatch], ForwardBatch] = lambda step, batch: batch,
    images: Sequence[tuple[Image, ...]] | None = None,
) -> list[torch.Tensor]:
    """Return logits [computed tokens, vocabulary] of each prompt. `prepare` may change batches.

    `images` are those of each prompt, for their positions.

    The prompts' blocks are scattered over a new KV cache. Within a step, decodes come before
    chunks, in the scheduler's order.
    """
    size, groups = runner.kv.block_size, runner.kv.groups
    sources = sources or [[]] * len(prompts)
    pairs = list(zip(prompts, sources, strict=True))
    needed = [[-(-len(s if g.is_cross else p) // size) for g in groups] for p, s in pairs]
    total = sum(map(sum, needed))
    scattered = random.Random(0).sample(range(1, total + 1), total)
    states = None
    if runner.kv.states is not None:
        slots = len(prompts) + 1
        states = [
            tuple(part.new_zeros(slots, *part.shape[1:]) for part in layer)
            for layer in runner.kv.states
        ]
    dtype = runner.kv.layers[0].keys.dtype
    kv = KVCache(kv_specs(runner.model), total, size, dtype, runner.device, states)
    params = SamplingParams(max_tokens=1)
    rows, blocks, encoder_inputs = [], [], []
    for row, (prompt, source) in enumerate(pairs):
        shown = images[row] if images else ()
        rows.append(NewRow(row, tuple(prompt), len(prompt), params, len(source), images=shown))
        tables = [tuple(scattered.pop() for _ in range(count)) for count in needed[row]]
        blocks += [NewBlocks(row, group, 0, ids) for group, ids in enumerate(tables)]
        if source:
            own = tuple((n, ids) for n, ids in enumerate(tables) if groups[n].is_cross)
            encoder_inputs.append(EncoderInput(row, tuple(source), blocks=own))
    runner.rows.apply(Step(new_rows=tuple(rows), new_blocks=tuple(blocks)))
    if encoder_inputs:
        runner.model.encode(build_encoder_batch(encoder_inputs, kv, runner.backend, runner.device))
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for turn in plan:
        slices = []
        for index, count in sorted(turn, key=lambda part: part[1] > 1):
            slot = index + 1
            own = (slot if done[index] else 0), ((count - 1, slot),)
            part = ScheduledSlice(index, 0, index, done[index], count, samples=False, states=own)
            slices.append(part)
            done[index] += count
        step = Step(tuple(slices))
        batch = prepare(step, build_batch(step, runner.rows, kv, runner.backend))
        result = runner.model.logits(runner.model.forward(batch))
        for slice_, part in zip(slices, result.split([s.count for s in slices]), strict=True):
            logits[slice_.row].append(part)
    assert not any(kv.layers[0].keys[0].flatten().tolist()), "the null block was written"
    return [torch.cat(parts) for parts in logits]


def whole(prompts: Sequence[list[int]]) -> Plan:
    """Return a plan that computes all prompts in one step."""
    return [[(index, len(prompt)) for index, prompt in enumerate(prompts)]]


def chunked(prompts: Sequence[list[int]], size: int) -> Plan:
    """Return a plan that computes every prompt in chunks of `size` tokens, all in parallel."""
    plan: Plan = []
    for start in range(0, max(map(len, prompts)), size):
        plan.append(
            [(i, min(size, len(p) - start)) for i, p in enumerate(prompts) if start < len(p)]
        )
    return plan
