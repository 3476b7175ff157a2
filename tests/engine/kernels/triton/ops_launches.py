"""Every launch of the kernels behind `engine.ops` that published models make, on meta tensors.

Whole steps of decodes and chunks run with an attention that launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from engine.attention.backend import GroupLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache, LayerKV
from engine.attention.spec import AttentionSpec
from engine.checkpoint.parameters import parameters_of
from engine.layers.attention import kv_specs
from engine.layers.state import new_states, state_specs
from engine.models.registry import model_class
from engine.ops.kernels import use_kernels
from engine.ops.sequence_rows import gather_decode_inputs
from engine.ops.state_runs import StateRuns
from engine.sampling.sampler import DrawParams, draw, draw_next
from tests.support.published import PUBLISHED

TOKENS = (1, 2, 3, 5, 21)  # token counts that together select every kernel and block size


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class NoAttention:
    """A plan for `tokens` whose attention launches nothing."""

    def __init__(self, tokens: int, num_groups: int) -> None:
        slots = meta(tokens)
        groups = [GroupLayout(block_tables=meta(tokens, 1), token_blocks=slots)] * num_groups
        # The kernels that are launched here read the slots and nothing else of a layout.
        self.layout = SimpleNamespace(groups=groups, token_offsets=slots)

    def attend(
        self, spec: AttentionSpec, kv: LayerKV | None, query: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], spec.result_dim)

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
        pass


def step(model: Any, kind: str, kv: KVCache, tokens: int) -> None:
    """Run everything a model computes for `tokens` tokens, and draw one token for each."""
    ids = (meta(tokens) for _ in range(3))
    batch = ForwardBatch(*ids, kv, NoAttention(tokens, len(kv.groups)), tokens)
    if kv.states:
        runs = StateRuns(meta(tokens + 1), meta(tokens), meta(tokens))
        batch = replace(batch, runs=runs)
    if kind != "decoder":
        model.encode(batch)
    if kind != "encoder":
        logits = model.logits(model.forward(batch))
        draw(logits, params_of(tokens, torch.int64), "triton")
        rows, known = params_of(257, torch.int32), meta(257, 8193, dtype=torch.int32)
        draw_next(logits, rows, known, 256, meta(tokens), meta(tokens), "triton")


def params_of(rows: int, positions: torch.dtype) -> DrawParams:
    floats = [meta(rows, dtype=torch.float32) for _ in range(3)]
    top_k = meta(rows, dtype=torch.int32)
    return DrawParams(floats[0], top_k, *floats[1:], meta(rows), meta(rows, dtype=positions))


def gather(groups: int) -> None:
    """Gather a captured step's inputs from the rows."""
    row_ids, lengths = meta(5), meta(257, dtype=torch.int32)
    tokens = meta(257, 8193, dtype=torch.int32)
    tables = meta(groups, 257, 128)
    gather_decode_inputs(row_ids, meta(5), tokens, lengths, tables, 64, kernels="triton")


def launches(name: str, config: dict[str, Any], dtype: torch.dtype) -> Iterator[str]:
    """Run the model's steps and yield `name`."""
    _, kind, build = model_class(config)
    device = torch.device("meta")
    with device:
        model = build(config, max_positions=512, dtype=dtype).to(device, dtype)
    for layer in model.modules():
        if (own := parameters_of(layer).dtype) is not None:
            layer.to(own)
    use_kernels(model, "triton")
    states = new_states(state_specs(model), 3, dtype, device)
    kv = KVCache(kv_specs(model), 9, 64, dtype, device, states)
    with torch.inference_mode():
        for tokens in TOKENS:
            step(model, kind, kv, tokens)
        gather(len(kv.groups))
    yield name


def published() -> Iterator[str]:
    """Launch for all models in bf16, and for one model in each other dtype."""
    for name, config in PUBLISHED.items():
        yield from launches(name, config, torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        yield from launches(f"llama-3.1-8b in {dtype}", PUBLISHED["llama-3.1-8b"], dtype)


def benchmarked() -> Iterator[str]:
    for name in ("qwen3-0.6b", "gemma-2-2b"):
        yield from launches(name, PUBLISHED[name], torch.bfloat16)


def experts() -> Iterator[str]:
    for name in ("Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "DeepSeek-V3"):
        yield from launches(name, PUBLISHED[name], torch.bfloat16)
