"""Lookup of the rows of a packed weight on a CPU (`source/lookup.py`)."""

from __future__ import annotations

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import LookupCall
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.machine_code import kernel_store

PART = 2**13  # inputs that are worth a thread
PANELS_LOOKUP: Kernel = ("lookup.panels_kernel",)


def codes_lookup(bits: int, *, has_offsets: bool) -> Kernel:
    """Return the kernel for codes."""
    return "lookup.codes_kernel", bits, has_offsets


def panel_rows(ids: torch.Tensor, packed: torch.Tensor, inputs: int, width: int) -> torch.Tensor:
    """Return rows [T, inputs] of a bf16 weight that `pack_panels` packed, for ids [T]."""
    call = LookupCall(weight=packed.data_ptr(), width=width)
    return _rows(PANELS_LOOKUP, call, ids, inputs)


def code_rows(
    ids: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, inputs: int, bits: int
) -> torch.Tensor:
    """Return rows [T, inputs] in bf16 of a weight of `CodesLinear`, for ids [T].

    The scales [panels, groups, parts, 16] have offsets for a second part.
    """
    call = LookupCall(weight=codes.data_ptr(), scales=scales.data_ptr())
    return _rows(codes_lookup(bits, has_offsets=scales.shape[2] == 2), call, ids, inputs)


def _rows(kernel: Kernel, call: LookupCall, ids: torch.Tensor, inputs: int) -> torch.Tensor:
    assert ids.dtype == torch.int64
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, inputs, dtype=torch.bfloat16)
    call.rows = ids.numel()
    call.at_once = max(1, PART // inputs)
    call.ids = ids.data_ptr()
    call.inputs = inputs
    call.out = out.data_ptr()
    name, *shape = kernel
    address = kernel_store().address(str(name), *map(int, shape))
    in_threads(address, call, alone=out.numel() < 2 * PART)
    return out
