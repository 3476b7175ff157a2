"""Tolerances between kernels and their references."""

from __future__ import annotations

import torch

# (relative, absolute). Kernels round once to the dtype; the reference sometimes rounds more often.
# The interpreter truncates bf16 where a GPU rounds, which adds one unit in the last place.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 4e-3),
    torch.bfloat16: (2e-2, 3e-2),
}


def check(found: torch.Tensor, due: torch.Tensor) -> None:
    """Assert that `found` equals `due` within the tolerance of its dtype and has no NaN."""
    assert found.dtype == due.dtype
    rtol, atol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), due.double(), rtol=rtol, atol=atol)
