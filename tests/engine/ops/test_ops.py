"""Row-wise ops match their formulas in fp64, in every dtype and at odd sizes."""

from __future__ import annotations

import math

import pytest
import torch

from engine.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from engine.ops.gated import (
    gelu_tanh,
    gelu_tanh_mul,
    relu_squared,
    sigmoid,
    sigmoid_mul,
    silu_mul,
)
from engine.ops.kernels import Kernels, use_kernels
from engine.ops.norm import gated_rms_norm, layer_norm, rms_norm
from engine.ops.rotary import apply_rotary, apply_rotary_pairs
from engine.ops.softcap import softcap

pytestmark = pytest.mark.usefixtures("one_thread")
# bf16 results may differ from the rounded exact result by one unit in the last place.
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (1.6e-2, 1e-3)}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
shapes = pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 64), (5, 97), (33, 576)], ids=str)


@pytest.fixture(params=["torch", "numba"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Run each test with torch and with Numba's kernels."""
    return request.param


def draw(*shape: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def check(found: torch.Tensor, due: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), due, rtol=rtol, atol=atol)


@dtypes
@shapes
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_rms_norm_matches_fp64(
    shape: tuple[int, int], dtype: torch.dtype, eps: float, kernels: Kernels
) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype, seed=1)
    exact = x.double()
    due = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    check(rms_norm(x, weight, eps, kernels=kernels), due, dtype)
    check(rms_norm(x, None, eps, kernels=kernels), due / weight.double(), dtype)


@dtypes
@shapes
def test_rms_norm_with_offset_matches_fp64(
    shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels
) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype, scale=0.3, seed=1)
    exact = x.double()
    due = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    check(rms_norm(x, weight, 1e-6, offset=True, kernels=kernels), due, dtype)


@dtypes
def test_rms_norm_huge_and_tiny_values_match_fp64(dtype: torch.dtype, kernels: Kernels) -> None:
    """Squares are summed in fp32: bf16 would lose small terms, and fp16 would overflow."""
    x = torch.full((2, 1000), 1.0, dtype=dtype)
    x[0, 0], x[1] = 300.0, 1e-4
    exact = x.double()
    due = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    check(rms_norm(x, torch.ones(1000, dtype=dtype), 1e-5, kernels=kernels), due, dtype)


@dtypes
@shapes
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_layer_norm_matches_fp64(
    shape: tuple[int, int], dtype: torch.dtype, eps: float, kernels: Kernels
) -> None:
    x = draw(*shape, dtype=dtype) + 2
    weight, bias = draw(shape[1], dtype=dtype, seed=1), draw(shape[1], dtype=dtype, seed=2)
    exact = x.double()
    centred = exact - exact.mean(-1, keepdim=True)
    due = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    found = layer_norm(x, weight, bias, eps, kernels=kernels)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.double(), due * weight.double() + bias.double(), rtol=rtol, atol=atol * 30
    )
    found = layer_norm(x, weight, None, eps, kernels=kernels)
    torch.testing.assert_close(found.double(), due * weight.double(), rtol=rtol, atol=atol * 30)


@dtypes
@pytest.mark.parametrize("shape", [(1, 7), (5, 97), (5, 3, 64), (33, 2, 48)], ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_gated_rms_norm_matches_fp64(
    shape: tuple[int, ...], dtype: torch.dtype, gate_first: bool, eps: float, kernels: Kernels
) -> None:
    x, gate = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weights = [draw(shape[-1], dtype=dtype, seed=2)]
    if len(shape) == 3:
        weights.append(draw(*shape[1:], dtype=dtype, seed=2))
    factor = gate.double() / (1 + (-gate.double()).exp())
    exact = x.double() * factor if gate_first else x.double()
    due = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    for weight in weights:
        found = gated_rms_norm(x, gate, weight, eps, gate_first=gate_first, kernels=kernels)
        scaled = due * weight.double()
        check(found, scaled if gate_first else scaled * factor, dtype)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (5, 97), (33, 2, 48)], ids=str)
def test_sigmoid_mul_matches_fp64(
    shape: tuple[int, ...], dtype: torch.dtype, kernels: Kernels
) -> None:
    x, gate = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    check(sigmoid_mul(x, gate, kernels), x.double() / (1 + (-gate.double()).exp()), dtype)


def test_gates_with_any_strides_equal_contiguous_ones(kernels: Kernels) -> None:
    """A gate is a part of each token's projection, or of each of its heads."""
    wide = draw(5, 3, 100, dtype=torch.float32)
    weight = draw(32, dtype=torch.float32)
    for x, gate in ((wide[..., :32], wide[..., 32:64]), (wide[:, 1:, 8:40], wide[:, :2, 60:92])):
        copies = x.contiguous(), gate.contiguous()
        due = sigmoid_mul(*copies, kernels)
        assert torch.equal(sigmoid_mul(x, gate, kernels), due)
        assert torch.equal(sigmoid_mul(x[:, 0], gate[:, 0], kernels), due[:, 0])
        for gate_first in (False, True):
            norms = [
                gated_rms_norm(*each, weight, 1e-5, gate_first=gate_first, kernels=kernels)
                for each in ((x, gate), copies)
            ]
            assert torch.equal(*norms)


def test_extreme_gates_do_not_overflow(kernels: Kernels) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    x = torch.full_like(gate, 2.0)
    found = sigmoid_mul(x, gate, kernels)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 1.0, 2.0, 2.0]]))
    for gate_first in (False, True):
        normed = gated_rms_norm(
            x, gate, torch.ones(5), 1e-5, gate_first=gate_first, kernels=kernels
        )
        assert normed.isfinite().all()


def test_norm_layers_equal_their_ops(kernels: Kernels) -> None:
    x = draw(3, 8, dtype=torch.float32)
    rms, offset, layer = RMSNorm(8, 1e-5), OffsetRMSNorm(8, 1e-5), LayerNorm(8, 1e-5)
    for norm in (rms, offset, layer):
        use_kernels(norm, kernels)
    for parameter in (rms.weight, offset.weight, layer.weight, layer.bias):
        parameter.data = draw(8, dtype=torch.float32, seed=parameter.dim())
    assert torch.equal(rms(x), rms_norm(x, rms.weight, 1e-5, kernels=kernels))
    assert torch.equal(offset(x), rms_norm(x, offset.weight, 1e-5, offset=True, kernels=kernels))
    assert torch.equal(layer(x), layer_norm(x, layer.weight, layer.bias, 1e-5, kernels=kernels))


@dtypes
@shapes
def test_silu_mul_matches_fp64(
    shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels
) -> None:
    gate, up = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    exact = gate.double()
    due = exact / (1 + (-exact).exp()) * up.double()
    check(silu_mul(torch.cat([gate, up], -1), kernels=kernels), due, dtype)


def test_silu_mul_extreme_gates_do_not_overflow(kernels: Kernels) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0]])
    found = silu_mul(torch.cat([gate, torch.full_like(gate, 2.0)], -1), kernels=kernels)
    torch.testing.assert_close(
        found, torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4, 2 / (1 + math.exp(-1))]])
    )


@dtypes
@shapes
def test_gelu_tanh_matches_fp64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    exact = x.double()
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    check(gelu_tanh(x), exact / 2 * (1 + inner.tanh()), dtype)


@dtypes
def test_gelu_tanh_mul_matches_fp64(dtype: torch.dtype, kernels: Kernels) -> None:
    gate, up = draw(5, 97, dtype=dtype), draw(5, 97, dtype=dtype, seed=1)
    exact = gate.double()
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    due = exact / 2 * (1 + inner.tanh()) * up.double()
    check(gelu_tanh_mul(torch.cat([gate, up], -1), kernels=kernels), due, dtype)


@dtypes
@shapes
def test_relu_squared_matches_fp64(
    shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels
) -> None:
    x = draw(*shape, dtype=dtype)
    check(relu_squared(x, kernels=kernels), x.double().clamp(min=0).square(), dtype)


@dtypes
@shapes
def test_sigmoid_matches_fp64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    check(sigmoid(x), 1 / (1 + (-x.double()).exp()), dtype)


def test_sigmoid_extreme_values_are_0_and_1() -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    assert sigmoid(x).tolist() == [0, 0, 0.5, 1, 1]


@dtypes
def test_softcap_returns_bounded_fp32(dtype: torch.dtype, kernels: Kernels) -> None:
    """In bf16, logits near the cap would become equal."""
    x = draw(5, 97, dtype=dtype, scale=30.0)
    found = softcap(x, 30.0, kernels=kernels)
    check(found, 30 * torch.tanh(x.double() / 30), torch.float32)
    assert found.abs().max() <= 30
    assert (found.bfloat16() != found).any()


def test_gelu_tanh_differs_from_erf_gelu() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    erf = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    assert (gelu_tanh(x) - erf).abs().max() > 1e-4


@dtypes
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 8), (12, 64), (2, 80)])
def test_apply_rotary_matches_complex_multiplication(
    heads: int, dim: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    """The halves of a head are real and imaginary parts. Each token has its own angles."""
    x, angles = draw(5, heads, dim, dtype=dtype), draw(5, 1, dim // 2, dtype=torch.float64)
    cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    found = apply_rotary(x, cos, sin, kernels=kernels)
    assert found.dtype == dtype
    atol = 2e-6 if dtype == torch.float32 else 6e-2  # table and products are rounded in bf16
    torch.testing.assert_close(
        found.double(), torch.cat([turned.real, turned.imag], -1), rtol=atol / 2, atol=atol
    )


def in_halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return x with the even dimensions of the first `width` before the odd ones."""
    return torch.cat([x[..., :width:2], x[..., 1:width:2], x[..., width:]], -1)


@dtypes
@pytest.mark.parametrize(("dim", "width"), [(2, 2), (16, 12), (80, 80)])
def test_apply_rotary_pairs_is_apply_rotary_of_reordered_dimensions(
    dim: int, width: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    x, angles = draw(5, 3, dim, dtype=dtype), draw(2, 5, 1, width, dtype=dtype, seed=1)
    cos, sin = angles
    found = in_halves(apply_rotary_pairs(x, cos, sin, kernels=kernels), width)
    due = apply_rotary(
        in_halves(x, width), in_halves(cos, width), in_halves(sin, width), kernels=kernels
    )
    assert torch.equal(found, due)


def test_apply_rotary_strided_input_equals_contiguous(kernels: Kernels) -> None:
    """The heads of a token need not be contiguous."""
    x, angles = draw(5, 3, 16, dtype=torch.float32), draw(5, 1, 8, dtype=torch.float32)
    part = x[..., :8]
    assert torch.equal(
        apply_rotary(part, angles, angles, kernels=kernels),
        apply_rotary(+part, angles, angles, kernels=kernels),
    )


@dtypes
@pytest.mark.parametrize(("dim", "width"), [(8, 2), (16, 12), (80, 32)])
def test_apply_rotary_of_a_part_leaves_the_rest_of_each_head(
    dim: int, width: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    x, angles = draw(5, 3, dim, dtype=dtype), draw(2, 5, 1, width, dtype=dtype, seed=1)
    found = apply_rotary(x, *angles, kernels=kernels)
    assert torch.equal(found[..., width:], x[..., width:])
    due = apply_rotary(x[..., :width], *angles, kernels=kernels)
    assert torch.equal(found[..., :width], due)


def test_ops_do_not_modify_their_inputs(kernels: Kernels) -> None:
    x = draw(4, 2, 8, dtype=torch.float32)
    before = x.clone()
    rms_norm(x, torch.ones(8), 1e-5, kernels=kernels)
    rms_norm(x, None, 1e-5, kernels=kernels)
    layer_norm(x, torch.ones(8), torch.zeros(8), 1e-5, kernels=kernels)
    rms_norm(x, torch.ones(8), 1e-5, offset=True, kernels=kernels)
    softcap(x, 2.0, kernels=kernels)
    silu_mul(x, kernels=kernels)
    gelu_tanh_mul(x, kernels=kernels)
    gelu_tanh(x)
    relu_squared(x, kernels=kernels)
    sigmoid(x)
    sigmoid_mul(x, x, kernels)
    gated_rms_norm(x, x, torch.ones(8), 1e-5, gate_first=True, kernels=kernels)
    gated_rms_norm(x, x, torch.ones(8), 1e-5, gate_first=False, kernels=kernels)
    apply_rotary(x, torch.ones(4, 1, 8), torch.ones(4, 1, 8), kernels=kernels)
    apply_rotary_pairs(x, torch.ones(4, 1, 8), torch.ones(4, 1, 8), kernels=kernels)
    assert torch.equal(x, before)
