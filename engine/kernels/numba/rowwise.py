"""Norms, activations and rotations on a CPU, which read and write each token's values once.

torch would create a tensor for every operation in them. All of them compute in fp32. A row's result
does not depend on the other rows.
"""

from __future__ import annotations

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import (
    GATED_GELU,
    GATED_GELU_TANH,
    GATED_SILU,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NORM,
    PAIR_ROTATION,
    ROTATION,
    RowsCall,
)
from engine.kernels.numba.machine_code import kernel_store

PART = 2**14  # elements that are worth a thread
GATED = {"silu": GATED_SILU, "gelu": GATED_GELU, "gelu_tanh": GATED_GELU_TANH}
PLAIN = {"gelu": GELU, "gelu_tanh": GELU_TANH}


def norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + delta, its RMS norm), [..., N] each; without a delta, (x, its RMS norm).

    `offset` adds one to the weights. The rows of x and delta are contiguous, with any stride
    between rows.
    """
    assert weight is None or weight.dtype == x.dtype
    call = RowsCall(heads=1, key_head=1, eps=eps, offset=float(offset))
    call.weight = 0 if weight is None else weight.data_ptr()
    return _norm_rows(NORM, x, delta, call)


def layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + delta, its layer norm), [..., N] each, as `norm` does."""
    assert weight.dtype == x.dtype
    call = RowsCall(weight=weight.data_ptr(), eps=eps)
    if bias is not None:
        assert bias.dtype == x.dtype
        call.bias = bias.data_ptr()
    return _norm_rows(LAYER_NORM, x, delta, call)


def _norm_rows(
    operation: int, x: torch.Tensor, delta: torch.Tensor | None, call: RowsCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill in the rows of `call`, and norm them."""
    rows = _flat(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x
    if delta is not None:
        total = torch.empty(x.shape, dtype=x.dtype)
        other = _flat(delta)
        call.other = other.data_ptr()
        call.other_stride = other.stride(0)
    call.rows = len(rows)
    call.size = x.shape[-1]
    call.x = rows.data_ptr()
    call.x_stride = rows.stride(0)
    call.sum = total.data_ptr()
    call.out = out.data_ptr()
    _run(operation, x.dtype, call)
    return total, out


def norm_heads(
    qk: torch.Tensor,
    heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    *,
    offset: bool = False,
) -> torch.Tensor:
    """Return the RMS norm of each head of qk [T, H + Hkv, D]; the first `heads` have `q_weight`.

    The heads of a token are contiguous, with any stride between tokens.
    """
    assert qk[0].is_contiguous()
    weights = (q_weight, k_weight)
    assert all(weight is None or weight.dtype == qk.dtype for weight in weights)
    addresses = [0 if weight is None else weight.data_ptr() for weight in weights]
    tokens, count, size = qk.shape
    out = torch.empty(qk.shape, dtype=qk.dtype)
    call = RowsCall(
        rows=tokens * count,
        size=size,
        x=qk.data_ptr(),
        x_stride=qk.stride(0),
        weight=addresses[0],
        heads=count,
        key_head=heads,
        key_weight=addresses[1],
        out=out.data_ptr(),
        eps=eps,
        offset=float(offset),
    )
    _run(NORM, qk.dtype, call)
    return out


def activate(x: torch.Tensor, kind: str, *, gated: bool) -> torch.Tensor:
    """Return `kind`(x) [..., N], or `kind`(gate) * up if each row [..., 2 * N] is gate and then up.

    `kind` is gelu or gelu_tanh, or with a gate silu.
    """
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    rows = _flat(x)
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype)
    call = RowsCall(
        rows=len(rows),
        size=size,
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        out=out.data_ptr(),
    )
    _run((GATED if gated else PLAIN)[kind], x.dtype, call)
    return out


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, pairs: bool = False
) -> torch.Tensor:
    """Rotate x [T, H, D] by cos and sin [T, 1, R], as ops.rotary.apply_rotary does.

    With `pairs`, rotate as apply_rotary_pairs does.
    x is copied unless the heads of a token are contiguous.
    """
    if not x[0].is_contiguous():
        x = x.contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert cos.dtype == sin.dtype == x.dtype
    out = torch.empty(x.shape, dtype=x.dtype)
    call = RowsCall(
        rows=len(out),
        size=out[0].numel(),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        out=out.data_ptr(),
        dim=x.shape[2],
        width=cos.shape[2],
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
    )
    _run(PAIR_ROTATION if pairs else ROTATION, x.dtype, call)
    return out


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Reshape to [rows, N]; no copy if there is a single stride between rows."""
    assert x.stride(-1) == 1
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1])


def _run(operation: int, dtype: torch.dtype, call: RowsCall) -> None:
    kernel = kernel_store().address("rowwise.rows_kernel", operation, dtype == torch.bfloat16)
    elements = call.rows * call.size
    call.at_once = max(1, PART // (4 * call.size))
    in_threads(kernel, call, alone=elements < 2 * PART)
