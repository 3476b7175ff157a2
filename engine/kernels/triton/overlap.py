"""Programmatic dependent launch: a kernel starts while the kernel before it is still ending.

Each kernel of a decoder layer calls `wait_for_inputs` before it reads what other kernels wrote. Its
programs are on the device by then, and launching them costs no time. A kernel may do before the
wait what depends on no other kernel: a linear layer reads its weight.

The next kernel may start once all programs of this one have triggered it, or ended. It then waits
itself, until this kernel has ended and its results can be read. So a trigger never makes a result
wrong, and may come first. Kernels that do not wait start, as ever, when all earlier ones have
ended. As every overlapped kernel waits in all its programs, that includes the kernels before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton.chips import Features, features_of

# Values of the constant OVERLAP.
APART: tl.constexpr = tl.constexpr(0)  # a kernel starts when the one before has ended
WAIT_FIRST: tl.constexpr = tl.constexpr(1)  # wait, then trigger
TRIGGER_FIRST: tl.constexpr = tl.constexpr(2)


def overlap_of(features: Features) -> int:
    """Return the constant OVERLAP of kernels with these features."""
    if not features.overlap:
        return APART.value
    return TRIGGER_FIRST.value if features.trigger_first else WAIT_FIRST.value


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a launch on `device`: the constant OVERLAP, and Triton's own."""
    overlap = overlap_of(features_of(device))
    if overlap == APART.value:
        return {"OVERLAP": overlap}
    return {"OVERLAP": overlap, "launch_pdl": True}


# Triton's own functions for both instructions fail in Triton 3.4, and its wait does not say that
# memory changes, so that loads might move before it.
@triton.jit
def _trigger():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next kernel start, if this is done first. `wait_for_inputs` must follow."""
    if OVERLAP == TRIGGER_FIRST:
        _trigger()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended, and let the next one start."""
    if OVERLAP != APART:
        let_next_start(OVERLAP)  # a second trigger has no effect
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        if OVERLAP == WAIT_FIRST:
            _trigger()


@triton.jit
def held(x, OVERLAP: tl.constexpr):
    """Return x, of 16-bit elements, which stays in registers up to here.

    Triton would write a loaded tile to shared memory at once, and so wait for it. After
    `wait_for_inputs`, this keeps the loads before the wait and their use behind it.
    """
    if OVERLAP != APART:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x


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
