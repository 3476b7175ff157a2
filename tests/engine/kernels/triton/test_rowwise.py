"""Kernels of norms, activations and the token embedding equal their torch references."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine.ops.embedding import embed
from engine.ops.gated import gelu_tanh_mul, relu_squared, sigmoid_mul, silu_mul
from engine.ops.norm import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from engine.ops.softcap import softcap
from tests.support.interpreter import launches
from tests.support.tolerances import TOLERANCE, check

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# One row and several; sizes that are powers of two and sizes that are not.
shapes = pytest.mark.parametrize(
    "shape", [(1, 1), (1, 640), (3, 97), (2, 5, 80), (33, 64)], ids=str
)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul(2).to(dtype)


def same(operation: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *args, **kwargs):
    """Check that the op's kernel equals torch and leaves the arguments unchanged."""
    due = operation(*args, **kwargs, kernels="torch")
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    found = operation(*args, **kwargs, kernels="triton")
    if isinstance(due, torch.Tensor):
        due, found = (due,), (found,)
    for one, other in zip(found, due, strict=True):
        assert one.shape == other.shape
        check(one, other)
    for now, then in zip(args, before, strict=True):
        assert now is then or torch.equal(now, then)


@dtypes
@shapes
def test_rms_norm_kernel_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    same(rms_norm, x, weight, 1e-5)
    same(rms_norm, x, None, 0.1)
    same(rms_norm, x, weight, 1e-6, offset=True)


@dtypes
@shapes
def test_add_rms_norm_kernel_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight, post = (draw(shape[-1], dtype=dtype, seed=seed) for seed in (2, 3))
    same(add_rms_norm, x, delta, weight, 1e-5)
    same(add_rms_norm, x, delta, None, 1e-5)
    same(add_rms_norm, x, delta, weight, 1e-6, offset=True)
    same(add_rms_norm, x, delta, weight, 1e-6, offset=True, post=post)
    same(add_rms_norm, x, delta, weight, 1e-6, post=post)


@dtypes
@shapes
def test_layer_norm_kernel_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta = draw(*shape, dtype=dtype) + 2, draw(*shape, dtype=dtype, seed=1)
    weight, bias = (draw(shape[-1], dtype=dtype, seed=seed) for seed in (2, 3))
    same(layer_norm, x, weight, bias, 1e-5)
    same(add_layer_norm, x, delta, weight, bias, 1e-5)


def test_norm_kernels_strided_rows_equal_torch() -> None:
    wide = draw(6, 200, dtype=torch.float32)
    weight = draw(70, dtype=torch.float32)
    same(rms_norm, wide[:, 30:100], weight, 1e-5)
    same(add_rms_norm, wide[::2, :70], wide[1::2, 100:170], weight, 1e-5)
    same(rms_norm, wide.T[30:100].T, weight, 1e-5)
    same(rms_norm, wide.view(6, 20, 10)[:, 3:10], weight[:10], 1e-5)


def test_norm_kernels_large_fp16_values_do_not_overflow() -> None:
    x = torch.full((2, 700), 300.0, dtype=torch.float16)  # its square overflows fp16
    same(rms_norm, x, None, 1e-5)
    same(add_rms_norm, x, x, None, 1e-5, post=torch.ones(700, dtype=torch.float16))


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 97), (2, 3, 1030)], ids=str)
def test_activation_kernels_equal_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row of 1030 elements needs several programs."""
    both = draw(*shape[:-1], 2 * shape[-1], dtype=dtype)
    same(silu_mul, both)
    same(gelu_tanh_mul, both)
    same(relu_squared, draw(*shape, dtype=dtype))


@dtypes
@pytest.mark.parametrize("shape", [(3, 97), (2, 3, 80)], ids=str)
def test_gate_kernels_equal_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    same(sigmoid_mul, x, gate)
    for weight in (draw(shape[-1], dtype=dtype, seed=2), draw(*shape[1:], dtype=dtype, seed=2)):
        for gate_first in (False, True):
            same(gated_rms_norm, x, gate, weight, 1e-5, gate_first=gate_first)


def test_gate_kernels_with_any_strides_equal_torch() -> None:
    wide = draw(4, 3, 100, dtype=torch.float32)
    weight = draw(30, dtype=torch.float32)
    for x, gate in ((wide[..., :30], wide[..., 40:70]), (wide[:, 1:, 5:35], wide[:, :2, 60:90])):
        for part in (slice(None), 0):
            given = x[:, part], gate[:, part]
            same(sigmoid_mul, *given)
            same(gated_rms_norm, *given, weight, 1e-5, gate_first=True)
            same(gated_rms_norm, *given, weight, 1e-5, gate_first=False)


@dtypes
def test_softcap_kernel_equals_torch(dtype: torch.dtype) -> None:
    """The result is fp32 for every dtype. Near zero a tanh of exponentials is least accurate."""
    x = draw(3, 1030, dtype=dtype)
    x[0] *= 1e-3
    same(softcap, x, 30.0)
    same(softcap, x.T, 0.5)


def test_activation_kernels_extreme_values_equal_torch() -> None:
    x = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4]])
    same(silu_mul, torch.cat([x, torch.full_like(x, 2.0)], -1))
    same(gelu_tanh_mul, torch.cat([x, torch.full_like(x, 2.0)], -1))
    same(relu_squared, x)


@dtypes
def test_embedding_kernel_equals_torch(dtype: torch.dtype) -> None:
    table = draw(50, 1030, dtype=dtype)
    for ids in (torch.tensor([49]), torch.tensor([3, 0, 3, 17, 49])):
        same(embed, ids, table)
        same(embed, ids, table, 55.5)


def test_kernels_without_rows_return_empty_tensors() -> None:
    nothing = torch.empty(0, 8)
    same(rms_norm, nothing, torch.ones(8), 1e-5)
    same(silu_mul, nothing)
    same(sigmoid_mul, nothing, nothing)
    same(gated_rms_norm, nothing, nothing, torch.ones(8), 1e-5, gate_first=True)
    same(embed, torch.empty(0, dtype=torch.int64), torch.ones(3, 8))


def test_ops_launch_kernels_only_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table = torch.ones(3, 8), torch.ones(5, 8)
    operations = [
        partial(rms_norm, x, None, 1e-5),
        partial(add_rms_norm, x, x, None, 1e-5),
        partial(layer_norm, x, x[0], x[0], 1e-5),
        partial(add_layer_norm, x, x, x[0], x[0], 1e-5),
        partial(silu_mul, x),
        partial(sigmoid_mul, x, x),
        partial(gated_rms_norm, x, x, x[0], 1e-5, gate_first=True),
        partial(gelu_tanh_mul, x),
        partial(relu_squared, x),
        partial(softcap, x, 2.0),
        partial(embed, torch.tensor([4]), table),
    ]
    counted = launches(monkeypatch)
    for operation in operations:
        for kernels in ("torch", "numba"):
            operation(kernels=kernels)
            assert not counted, operation
        operation(kernels="triton")
        assert counted.total() == 1, operation
        counted.clear()
