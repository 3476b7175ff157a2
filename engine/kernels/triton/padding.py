"""Results of the tokens behind the last run of a step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_padding(out_ptr, first, tokens, stride, mask):
    """Store zeros for the tokens from `first` on; `stride` elements lie between tokens."""
    for token in range(first, tokens):
        tl.store(out_ptr + token * stride, 0.0, mask)
