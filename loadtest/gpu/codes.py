"""Measure linear layers with quantised weights against those with bf16 weights."""

from __future__ import annotations

from functools import partial

import torch

from engine.layers.weights.code_rows import CodeRowsWeight
from engine.ops.codes import Quantization
from engine.ops.linear import linear
from loadtest.gpu.bench import Bench, Row
from loadtest.gpu.sweeps import linear_seconds, num_weights

KINDS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
# (inputs, outputs) of Llama-3.1-8B and of Qwen3-0.6B.
SHAPES = [(4096, 6144), (4096, 28672), (14336, 4096), (1024, 6144)]
ROWS = (1, 8, 16, 64, 256, 2048)


@torch.inference_mode()
def quantised(bench: Bench) -> list[Row]:
    """Measure each form at several row counts, as multiples of the speed with bf16."""
    shapes = [(64, 48)] if bench.smoke else SHAPES
    counts = (1, 17) if bench.smoke else ROWS
    rows: list[Row] = []
    for inputs, outputs in shapes:
        weight = torch.randn(outputs, inputs, device=bench.device, dtype=torch.bfloat16)
        plain = [weight.clone() for _ in range(copies(bench, weight.nbytes))]
        bf16 = {}
        for count in counts:
            bf16[count] = linear_seconds(
                partial(linear, kernels="triton"), activations(bench, count, inputs), plain
            )
        del plain
        for kind in KINDS:
            one = CodeRowsWeight(weight, kind, kernels="triton")
            made = [one]
            while len(made) < copies(bench, one.nbytes):
                made.append(CodeRowsWeight(weight, kind, kernels="triton"))
            for count in counts:
                x = activations(bench, count, inputs)
                seconds = linear_seconds(lambda x, weight: weight(x), x, made)
                share = 100 * one.nbytes / seconds / bench.chip.read
                note = f"{seconds * 1e6:.1f} us, {share:.0f} % of read"
                what = f"{kind} linear, {count} rows, {inputs} to {outputs}"
                rows.append(Row(what, bf16[count] / seconds, "x bf16", note=note))
    return rows


def activations(bench: Bench, count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, device=bench.device, dtype=torch.bfloat16)


def copies(bench: Bench, size: int) -> int:
    """Return how many weights of `size` bytes do not fit into a cache together."""
    return 2 if bench.smoke else num_weights(size)
