"""Launches of the kernels for adapters, on meta tensors: the layers of Llama 3.1 8B in bf16."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels.triton.lora import add_low_rank

# Inputs and the outputs of each part.
LAYERS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
RANKS = (8, 16, 64, 128)
SLOTS = 8


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def in_bf16() -> Iterator[str]:
    """Each layer with one token and with many, at each rank."""
    for inputs, parts in LAYERS:
        outputs = sum(parts)
        starts = meta(len(parts) + 1, dtype=torch.int32)
        for rank in RANKS:
            a = meta(SLOTS, len(parts) * rank, inputs)
            b = meta(SLOTS, outputs, rank)
            for tokens in (1, 200):
                slots = meta(tokens, dtype=torch.int32)
                add_low_rank(meta(tokens, inputs), meta(tokens, outputs), a, b, slots, starts)
        yield f"{inputs} to {parts}"
