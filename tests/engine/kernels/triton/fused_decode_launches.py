"""Launches of the fused decode attention, on meta tensors, as published models make them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.attention.spec import AttentionSpec
from engine.kernels.triton.attention_shapes import Features
from engine.kernels.triton.chips import Features as ChipFeatures
from engine.kernels.triton.chips import force
from engine.kernels.triton.decode_launch import (
    FUSED_DIMS,
    Slots,
    Turn,
    fused_decode_attention,
    new_counters,
)
from tests.engine.kernels.triton import attention_launches
from tests.support.aot import record
from tests.support.published import PUBLISHED, attention_specs

META = torch.device("meta")
SEQUENCES = 5


def is_fused(spec: AttentionSpec) -> bool:
    """Whether decodes of a layer can be fused."""
    is_plain = spec.kind == "causal" and spec.value_dim is None and spec.relative is None
    return is_plain and spec.head_dim in FUSED_DIMS


def launch(
    spec: AttentionSpec, dtype: torch.dtype, block_size: int = 64, context: int = 8192
) -> None:
    """Launch for a layer with head norms, whose next weights are fetched."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = meta(SEQUENCES, heads + 2 * kv_heads, dim)
    qk, value = qkv.split([heads + kv_heads, kv_heads], 1)
    angles = meta(SEQUENCES, 1, dim), meta(SEQUENCES, 1, dim)
    turn = Turn(*angles, "first", (meta(dim), meta(dim)), 1e-6)
    places = meta(SEQUENCES, dtype=torch.int64)
    tables = meta(SEQUENCES, context // block_size, dtype=torch.int64)
    cache = [meta(100, kv_heads, block_size, dim) for _ in range(2)]
    slots = Slots(cache[0], cache[1], tables, places, meta(SEQUENCES, dtype=torch.int32))
    sinks = meta(heads) if spec.has_sinks else None
    features = Features(spec.scale, spec.window, spec.softcap, sinks=sinks)
    out = meta(SEQUENCES, heads, dim)
    weights = [meta(1024, heads * dim), meta(6144, 1024)]
    counters = new_counters(META)
    fused_decode_attention(out, qk, value, turn, slots, features, counters, weights)


def launches(names: Iterable[str], dtype: torch.dtype = torch.bfloat16) -> Iterator[str]:
    force(ChipFeatures(fused_attention=True, prefetch_bytes=8 << 20))
    for name in names:
        for spec in filter(is_fused, attention_specs(name)):
            launch(spec, dtype)
        yield f"{name} {str(dtype).removeprefix('torch.')}"


def benchmarked() -> Iterator[str]:
    yield from launches(["qwen3-0.6b", "llama-3.1-8b"])


def published() -> Iterator[str]:
    """Launch for all decoders in bf16, and for some in fp32, other blocks and a long context."""
    yield from launches(PUBLISHED)
    yield from launches(["llama-3.1-8b", "Llama-3.2-1B"], torch.float32)
    for block_size in (16, 32, 128):
        for spec in attention_specs("gemma-2-2b"):
            launch(spec, torch.bfloat16, block_size)
        yield f"gemma-2-2b, blocks of {block_size}"
    for spec in attention_specs("llama-3.1-8b"):
        launch(spec, torch.bfloat16, context=131072)
    yield "llama-3.1-8b, context of 131072"


def reductions() -> Iterator[str]:
    """Launch the fused kernel, and the kernels that it replaces, for a layer of Llama 3.1 8B."""
    yield from launches(["llama-3.1-8b"])
    (spec,) = attention_specs("llama-3.1-8b")
    attention_launches.launch(spec, torch.bfloat16)
    yield "today's kernels"


def print_ptx() -> None:
    """Print the PTX for sm_90a of the launches in `reductions`, by kernel, as JSON."""
    target = GPUTarget("cuda", 90, 32)
    found = {}
    for each in record(reductions):
        if "decode" in each.kernel.__name__ or "reduce" in each.kernel.__name__:
            binary = triton.compile(each.source(90), target=target, options=dict(each.options))
            found[each.kernel.__name__] = binary.asm["ptx"]
    print(json.dumps(found))


if __name__ == "__main__":
    print_ptx()
