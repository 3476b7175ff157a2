"""The layers of a model in one graph, without scheduler, embedding and head: the variants V0 to V6.

A layer's time is the difference between all layers and the first half of them, so that the start
of a graph and what surrounds the layers do not count. Every layer has weights of its own, so that
the L2 cache does not hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.attention.batch import ForwardBatch
from engine.protocol.generate import SamplingParams
from engine.runner.batch import decode_batch
from engine.scheduling.step import NewBlocks, NewRow, Step
from loadtest.gpu.bench import Bench, Row, captured, device_seconds
from loadtest.gpu.timeline import KernelTime, summarise
from loadtest.gpu.trace import traced
from loadtest.gpu.variants import PROMPT_VARIANTS, VARIANTS, Variant, forced
from loadtest.inprocess import Engine

MODELS = {"qwen3-0.6b": 28, "llama-3.1-8b": 8}  # layers; those of the 8B take long to fill
ROWS = (1, 8, 32, 64)
REPLAYS = 8  # of the graph that is traced
DRY_REPLAYS = 1
BLOCK = 64


def layers_engine(bench: Bench, model: str, layers: int, rows: int, context: int) -> Engine:
    """Return an engine with `layers` of the model, and rooms for `rows` full sequences."""
    return bench.engine(
        model,
        overrides={"num_hidden_layers": layers},
        attention_backend="triton",  # the only one whose steps are captured
        enforce_eager=True,
        block_size=BLOCK,
        max_num_seqs=rows,
        max_model_len=context,
        num_gpu_blocks_override=rows * -(-context // BLOCK),
    )


@torch.inference_mode()
def filled_batch(engine: Engine, rows: int, context: int) -> ForwardBatch:
    """Return the batch of the last tokens of `rows` sequences of `context` tokens.

    Their blocks lie in random order, and their keys and values are random numbers.
    """
    runner = engine.runner
    blocks = -(-context // BLOCK)
    order = torch.randperm(rows * blocks).add(1).view(rows, blocks).tolist()
    params = SamplingParams(max_tokens=1)
    tokens = (5,) * context
    new_rows = [NewRow(row, tokens, context, params) for row in range(rows)]
    new_blocks = [NewBlocks(row, 0, 0, tuple(order[row])) for row in range(rows)]
    runner.rows.apply(Step(new_rows=tuple(new_rows), new_blocks=tuple(new_blocks)))
    for layer in runner.kv.layers:
        layer.keys.normal_()
        assert layer.values is not None
        layer.values.normal_()
    row_ids = torch.arange(rows, device=runner.device)
    ahead = torch.zeros_like(row_ids)
    return decode_batch(row_ids, ahead, runner.rows, runner.kv, runner.backend)


def forward_of(engine: Engine, batch: ForwardBatch, layers: int) -> Callable[[], None]:
    """Return a function that computes the first `layers` layers of the model."""
    model: Any = engine.loaded.plan.model
    every = model.blocks

    @torch.inference_mode()
    def run() -> None:
        model.blocks = every[:layers]
        try:
            model.forward(batch)
        finally:
            model.blocks = every

    return run


def seconds_per_layer(engine: Engine, batch: ForwardBatch, layers: int) -> float:
    """Return the time of one layer, from graphs of all layers and of the first half."""
    half = layers // 2
    whole = device_seconds(captured(forward_of(engine, batch, layers)))
    return (whole - device_seconds(captured(forward_of(engine, batch, half)))) / (layers - half)


def chain(bench: Bench) -> list[Row]:
    """Measure the microseconds a layer of each variant, at several numbers of rows."""
    context = 16 if bench.smoke else 1024
    counts = (3,) if bench.smoke else ROWS
    models = {"qwen3-0.6b": 2} if bench.smoke else MODELS
    rows: list[Row] = []
    for model, layers in models.items():
        bound = partial(layer_bound, bench, model, context)
        for variant in VARIANTS:
            with forced(bench.features(variant.features)), bench.triton():
                engine = layers_engine(bench, model, layers, max(counts), context)
                for count in counts:
                    batch = filled_batch(engine, count, context)
                    seconds = seconds_per_layer(engine, batch, layers)
                    times = layer_times(forward_of(engine, batch, layers))
                    rows.append(
                        chain_row(model, count, variant, seconds, bound(count), times, layers)
                    )
                del engine
    return rows


def layer_bound(bench: Bench, model: str, context: int, count: int) -> float:
    """Return the seconds to read the weights and the KV of one layer."""
    shape, layers = bench.shape(model), bench.config(model)["num_hidden_layers"]
    size = 2.0 * shape.linear + count * context * shape.kv_bytes
    return float(size / layers / bench.chip.read)


def layer_times(run: Callable[[], None]) -> list[KernelTime]:
    """Return the time of each kernel at its place in the graph of `run`."""
    replay = captured(run)
    count = REPLAYS if torch.cuda.is_available() else DRY_REPLAYS

    def repeat() -> None:
        for _ in range(count):
            replay()

    return summarise(traced(repeat), count)


def chain_row(
    model: str,
    count: int,
    variant: Variant,
    seconds: float,
    bound: float,
    times: list[KernelTime],
    layers: int,
) -> Row:
    """Return the row of a variant: its microseconds a layer, and what the stop rules need."""
    lost = 1e6 * (seconds - bound)
    launches = sum(time.launches for time in times) / layers
    attention = [time for time in times if is_attention(time.place.name)]
    after = [time for time in times if is_attention(time.place.after)]
    out = [time for time in after if not is_attention(time.place.name)]
    figures = {
        "lost_us": lost,
        "launches": launches,
        "attention_us": per_layer(attention, layers),
        "out_us": per_layer(out, layers),
    }
    note = f"{lost:.1f} us lost, {launches:.1f} launches a layer"
    what = f"chain, {model}, {count} rows, {variant.name} {variant.adds}"
    return Row(what, 1e6 * seconds, "us/layer", note=note, figures=figures)


def is_attention(name: str) -> bool:
    return "decode" in name or name == "reduce_kernel"


def per_layer(times: list[KernelTime], layers: int) -> float:
    """Return the microseconds a layer by which these kernels move the end of the step."""
    return sum(time.added for time in times) / layers


def prompts(bench: Bench) -> list[Row]:
    """Measure what acts on prompts only: one long prompt through a few layers of the 8B."""
    model, length = "llama-3.1-8b", 40 if bench.smoke else 8192
    layers = 2 if bench.smoke else MODELS[model]
    rows = []
    for variant in PROMPT_VARIANTS:
        with forced(bench.features(variant.features)), bench.triton():
            engine = bench.engine(
                model,
                overrides={"num_hidden_layers": layers},
                attention_backend="triton",
                enforce_eager=True,
                max_num_seqs=1,
                max_model_len=2 * length,
                max_num_batched_tokens=length,
            )
            works = bench.works(model, 1, length, 1)
            seconds = device_seconds(partial(engine.generate, works))
            what = f"prompt of {length}, {variant.name} {variant.adds}"
            rows.append(Row(what, 1e6 * seconds / layers, "us/layer"))
            del engine
    return rows
