"""The draw of a token for each row of logits on a CPU (`source/draw.py`)."""

from __future__ import annotations

import ctypes

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import DrawCall
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.machine_code import kernel_store

DRAW: Kernel = ("draw.draw_kernel",)


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy_below: float,
    invalid: int,
) -> torch.Tensor:
    """Return tokens [R] int64 for fp32 logits [R, V], as `engine.sampling.draw` defines them.

    Each row of logits must be contiguous; the stride between rows is free. The parameters are
    dense.
    """
    rows, size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1 or size == 1
    tokens = torch.empty(rows, dtype=torch.int64)
    rooms = min(rows, torch.get_num_threads())
    room = torch.empty(rooms, 3, size, dtype=torch.int32)
    slots = ctypes.c_int64(0)
    call = DrawCall(
        slots=ctypes.addressof(slots),
        rooms=rooms,
        rows=rows,
        size=size,
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        temperature=temperature.data_ptr(),
        top_k=top_k.data_ptr(),
        top_p=top_p.data_ptr(),
        min_p=min_p.data_ptr(),
        seeds=seeds.data_ptr(),
        positions=positions.data_ptr(),
        room=room.data_ptr(),
        tokens=tokens.data_ptr(),
        invalid=invalid,
        greedy_below=greedy_below,
    )
    in_threads(kernel_store().address(str(DRAW[0])), call, alone=rows <= 1, constants=slots)
    return tokens
