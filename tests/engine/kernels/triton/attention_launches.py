"""Every attention launch that a model makes, on meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from engine.attention.backend import GroupLayout, StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.triton import TritonBackend
from engine.ops.kv_codes import is_coded
from tests.support.published import PUBLISHED, attention_specs

BLOCK_SIZE = 64
SLICED = 3  # decodes, and chunks; odd, so that slices are unaligned as in real batches


def launch(
    spec: AttentionSpec,
    dtype: torch.dtype,
    block_size: int = BLOCK_SIZE,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Run a step of decodes and chunks, including its KV writes, through the backend."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    counts = [1] * SLICED + [20] * SLICED
    tokens, sequences = sum(counts), len(counts)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    lengths, places = meta(sequences, dtype=torch.int32), meta(tokens, dtype=torch.int64)
    starts = meta(sequences + 1, dtype=torch.int32)
    width = 8192 // block_size + 1
    group = GroupLayout(meta(sequences, width, dtype=torch.int64), places, spec.window)
    layout = StepLayout(SLICED, None, None, lengths, starts, [group], places, places, block_size)
    if spec.sees_whole_images:
        layout = replace(layout, last_keys=meta(tokens, dtype=torch.int64))
    kv_dtype = kv_dtype or dtype
    has_values = spec.value_dim is None
    copies = 2 if has_values else 1
    cache = [meta(100, kv_heads, block_size, dim, dtype=kv_dtype) for _ in range(copies)]
    scales = [meta(100, kv_heads, block_size, dtype=torch.float32) for _ in range(copies)]
    kv = None
    if spec.kind != "full":
        values = cache[1] if has_values else None
        kv = LayerKV(cache[0], values, 0, *(scales if is_coded(kv_dtype) else ()))
    qkv = meta(tokens, heads + 2 * kv_heads, dim)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
    bias = meta(spec.relative.num_buckets, heads) if spec.relative else None
    sinks = meta(heads) if spec.has_sinks else None
    plan = TritonBackend(lengths.device).plan(layout)
    plan.attend(spec, kv, query, key, value if has_values else None, bias, sinks)


def launches(names: Iterable[str], dtype: torch.dtype = torch.bfloat16) -> Iterator[str]:
    for name in names:
        for spec in attention_specs(name):
            launch(spec, dtype)
        yield f"{name} {str(dtype).removeprefix('torch.')}"


def benchmarked() -> Iterator[str]:
    """Launch for two models of `make gpu-check`: plain attention, and every decoder feature."""
    yield from launches(["llama-3.1-8b", "gemma-2-2b"])


def coded() -> Iterator[str]:
    """Launch over keys and values of 8 bits, for the models of `benchmarked` and wide heads."""
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        for name in ("llama-3.1-8b", "gemma-2-2b", "gemma-4-31B"):
            for spec in attention_specs(name):
                launch(spec, torch.bfloat16, kv_dtype=kv_dtype)
            yield f"{name} {str(kv_dtype).removeprefix('torch.')}"


def published() -> Iterator[str]:
    """Launch for all models in bf16, and for those that differ in fp32 or other block sizes."""
    yield from launches(PUBLISHED)
    yield from launches(
        [
            *("llama-3.1-8b", "gemma-2-2b", "h2o-danube-1.8b", "t5-small", "all-MiniLM-L6"),
            "gemma-4-31B",
        ],
        torch.float32,
    )
    for block_size in (16, 32, 128):
        for spec in attention_specs("gemma-2-2b"):
            launch(spec, torch.bfloat16, block_size)
        yield f"gemma-2-2b, blocks of {block_size}"


def whole_images() -> Iterator[str]:
    """Launch for tokens of images that see each other, in full and in windowed layers."""
    specs = [replace(spec, sees_whole_images=True) for spec in attention_specs("gemma-3-4b")]
    for kv_dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        for spec in specs:
            launch(spec, torch.bfloat16, kv_dtype=kv_dtype)
        yield f"gemma-3-4b {str(kv_dtype).removeprefix('torch.')}"


def with_sinks() -> Iterator[str]:
    yield from launches(["gpt-oss-20b"])


def values_in_keys() -> Iterator[str]:
    """Launch for latent attention of 16 and of 128 heads, and over keys of 8 bits."""
    yield from launches(["DeepSeek-V2-Lite", "DeepSeek-V3"])
    yield from launches(["DeepSeek-V3"], torch.float32)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        for spec in attention_specs("DeepSeek-V3"):
            launch(spec, torch.bfloat16, kv_dtype=kv_dtype)
        yield f"DeepSeek-V3 {str(kv_dtype).removeprefix('torch.')}"
