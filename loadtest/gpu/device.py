"""Measure the chip's own limits, decode attention (the largest kernel) and the memory ledger."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.device.facts import available_memory
from engine.memory.report import MARGIN
from loadtest.gpu.bench import Bench, Row, captured, device_seconds
from loadtest.gpu.chain import filled_batch, layers_engine

LAYERS = 8


def ceilings(bench: Bench) -> list[Row]:
    """Measure memory bandwidth and bf16 matmul on random data; all shares are relative to these."""
    size, edge = (2**18, 256) if bench.smoke else (2**31, 8192)
    data = torch.randn(size, device=bench.device)
    read = data.nbytes / device_seconds(data.sum)
    copy = 2 * data.nbytes / device_seconds(data.clone)
    del data
    a, b = (torch.randn(edge, edge, device=bench.device).bfloat16() for _ in range(2))
    matmul = 2 * edge**3 / device_seconds(lambda: a @ b)
    return [
        Row("memory read", max(read, copy) / 1e12, "TB/s", note=f"sum {read:.3g}, copy {copy:.3g}"),
        Row("bf16 matmul", matmul / 1e12, "TFLOP/s", note=f"{edge}x{edge}x{edge}"),
    ]


def attention(bench: Bench) -> list[Row]:
    """Measure paged decode attention of an 8B layer.

    The KV of LAYERS layers is read in turn, so that the L2 cache does not hold it.
    """
    rows = []
    cases = [(2, 48)] if bench.smoke else [(64, 1024), (1, 8192)]
    for batch, context in cases:
        run, read = paged_attention(bench, batch, context)
        seconds = device_seconds(captured(run)) / LAYERS
        share = 100 * read / seconds / bench.chip.read
        goal = 85 if batch > 1 else 70
        what = f"decode attention alone, {batch} x {context} keys"
        rows.append(Row(what, share, "% of read", goal, note=f"{seconds * 1e6:.0f} us"))
    return rows


@torch.inference_mode()
def paged_attention(bench: Bench, batch: int, context: int) -> tuple[Callable[[], None], float]:
    """Return the attention of LAYERS layers as a function, and the bytes of KV of one layer.

    The function launches the kernels of attention and no others: the keys of the step are in the
    cache, and its lengths and block tables are gathered before.
    """
    engine = layers_engine(bench, "llama-3.1-8b", LAYERS, batch, context)
    runner = engine.runner
    plan = filled_batch(engine, batch, context).plan
    spec = engine.loaded.plan.kv_specs[0]
    dtype = engine.loaded.plan.dtype
    shape = batch, spec.num_heads, spec.head_dim
    query = torch.randn(shape, device=runner.device).to(dtype)

    @torch.inference_mode()
    def run() -> None:
        for layer in runner.kv.layers:
            plan.attend(spec, layer, query, None, None)

    read = 2 * batch * context * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return run, read


def ledger(bench: Bench) -> list[Row]:
    """Compare the banner's memory ledger with the memory in use.

    The engine takes 95 % of the GPU's memory, mostly for the KV cache.
    """
    before = available_memory(torch.device(bench.device))
    model, count = "qwen3-0.6b", 8 if bench.smoke else 256
    engine = bench.engine(model, max_num_seqs=count, gpu_memory_utilization=0.95)
    # The margin is memory that the engine leaves to others.
    entries = [entry for entry in engine.loaded.facts.memory if entry.name != MARGIN]
    engine.generate(bench.works(model, count, 24 if bench.smoke else 2000, 8))
    used = before - available_memory(engine.runner.device)
    off = []
    for total in (
        sum(entry.measured or entry.planned for entry in entries),
        sum(entry.planned for entry in entries),
    ):
        off.append(100 * abs(total - used) / used if used > 0 else 0.0)
    note = f"{used:,} bytes in use after a full step"
    return [
        Row("memory ledger, measured against used", off[0], "% off", 2, True, note),
        Row("memory ledger, estimated against used", off[1], "% off"),
    ]
