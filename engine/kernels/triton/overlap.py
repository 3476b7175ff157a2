"""Programmatic dependent launch: a kernel starts while the kernel before it is still ending.

Each kernel of a decoder layer calls `wait_for_inputs` before it reads what other kernels wrote. Its
programs are on the device by then, and launching them costs no time. A kernel may do before the
wait what depends on no other kernel: the linear of few rows fetches its weight into the L2 cache.

Kernels that do not call it start, as ever, when all earlier ones have ended.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton.chips import features_of


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a launch on `device`: the constant OVERLAP, and Triton's own."""
    if features_of(device).overlap:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended, and let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_to_cache(pointers):
    """Start to read the cache lines at `pointers` into the L2 cache; wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
