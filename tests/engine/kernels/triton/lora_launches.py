"""Launches of the kernels for adapters, on meta tensors: the layers of Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels.triton.lora import add_low_rank

# Inputs and the outputs of each part.
LAYERS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
RANKS = (8, 16, 64, 128, 2048)
SLOTS = 8


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(inputs: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    """Launch for one token and for many."""
    outputs = sum(parts)
    starts = meta(len(parts) + 1, dtype=torch.int32)
    a = meta(SLOTS, len(parts) * rank, inputs, dtype=dtype)
    b = meta(SLOTS, outputs, rank, dtype=dtype)
    for tokens in (1, 200):
        slots = meta(tokens, dtype=torch.int32)
        x, y = meta(tokens, inputs, dtype=dtype), meta(tokens, outputs, dtype=dtype)
        add_low_rank(x, y, a, b, slots, starts)


def everything() -> Iterator[str]:
    """Each layer in bf16 at each rank, and one layer in the other dtypes."""
    for inputs, parts in LAYERS:
        for rank in RANKS:
            launch(inputs, parts, rank, torch.bfloat16)
        yield f"{inputs} to {parts}"
    for dtype in (torch.float16, torch.float32):
        for rank in RANKS:
            launch(*LAYERS[0], rank, dtype)
        yield str(dtype)
