"""How far a kernel may be from its reference: one place for all kernels."""

from __future__ import annotations

import torch

# (relative, absolute). Both sides round once to the dtype, the reference in places more often; the
# interpreter cuts bf16 off where a GPU rounds, which is a whole unit of the last place more.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 4e-3),
    torch.bfloat16: (2e-2, 3e-2),
}


def check(found: torch.Tensor, due: torch.Tensor) -> None:
    """`found` is `due` within the tolerance of found's dtype, and NaN nowhere."""
    assert found.dtype == due.dtype
    rtol, atol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), due.double(), rtol=rtol, atol=atol)
