"""Numba's row-wise kernels: when they are used, and cases that test_ops.py does not cover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.kernels.numba import rowwise as rows
from engine.ops.gated import gelu_mul, gelu_tanh_mul, plain_gelu, plain_gelu_tanh, silu_mul
from engine.ops.kernels import Kernels
from engine.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from engine.ops.rotary import HeadNorm, apply_rotary, apply_rotary_pairs, norm_and_rotate
from tests.support.driver import tiny_llama
from tests.support.golden import load

COUNT = 300  # rows, enough for several threads


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


WEIGHT, ANGLES = bf16(256, seed=1), bf16(2, COUNT, 1, 64, seed=2)


def rms_norm_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return rms_norm(x, WEIGHT, 1e-5, kernels=kernels)


def add_rms_norm_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return torch.stack(add_rms_norm(x, x.flip(1), WEIGHT, 1e-5, offset=True, kernels=kernels))


def post_norm_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return torch.stack(add_rms_norm(x, x.flip(1), None, 1e-5, post=WEIGHT, kernels=kernels))


def rotary_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return apply_rotary(x.view(-1, 4, 64), ANGLES[0], ANGLES[1], kernels=kernels)


def pair_rotary_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return apply_rotary_pairs(x.view(-1, 4, 64), ANGLES[0], ANGLES[1], kernels=kernels)


def layer_norm_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return layer_norm(x, WEIGHT, WEIGHT.flip(0), 1e-5, kernels=kernels)


def add_layer_norm_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    return torch.stack(add_layer_norm(x, x.flip(1), WEIGHT, None, 1e-5, kernels=kernels))


def head_norm_op(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    norm = HeadNorm(WEIGHT[:64], WEIGHT[64:128], 1e-5, offset=True)
    return norm_and_rotate(x.view(-1, 4, 64), 3, None, norm, kernels=kernels)


Operation = Callable[..., torch.Tensor]  # of x and `kernels`
OPERATIONS: dict[str, Operation] = {
    "rms_norm": rms_norm_op,
    "add_rms_norm": add_rms_norm_op,
    "post_norm": post_norm_op,
    "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "gelu_tanh_mul": gelu_tanh_mul,
    "gelu": plain_gelu,
    "gelu_tanh": plain_gelu_tanh,
    "layer_norm": layer_norm_op,
    "add_layer_norm": add_layer_norm_op,
    "head_norm": head_norm_op,
    "rotary": rotary_op,
    "rotary_pairs": pair_rotary_op,
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []

    def counted(kernel: object, call: object, *, alone: bool = False) -> None:
        made.append(kernel)
        in_threads(kernel, call, alone=alone)

    in_threads = rows.in_threads
    monkeypatch.setattr(rows, "in_threads", counted)
    return made


@operations
def test_row_kernels_are_used_only_with_numba(operation: Operation, calls: list[object]) -> None:
    x = bf16(COUNT, 256)
    expected = operation(x, kernels="torch")
    assert not calls
    found = operation(x, kernels="numba")
    assert calls
    del calls[:]
    assert torch.equal(operation(x, kernels="torch"), expected)
    assert not calls, "a call must not change the implementation of later calls"
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


@operations
@pytest.mark.variants(4)
def test_row_kernels_in_many_threads_are_bitwise_equal(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PART", 2**10)  # so that many threads have work
    before, x = torch.get_num_threads(), bf16(COUNT, 256)
    try:
        torch.set_num_threads(1)
        expected = operation(x, kernels="numba")
        for threads in (2, 7):
            torch.set_num_threads(threads)
            for _ in range(20):
                assert torch.equal(operation(x, kernels="numba"), expected)
    finally:
        torch.set_num_threads(before)


@operations
def test_row_kernels_nan_row_leaves_others_unchanged(operation: Operation) -> None:
    x = bf16(COUNT, 256)
    expected = operation(x, kernels="numba")
    x[7] = float("nan")
    found = operation(x, kernels="numba")
    dim = found.shape.index(COUNT)
    assert found.select(dim, 7).isnan().all()
    rest = torch.tensor([row for row in range(COUNT) if row != 7])
    assert torch.equal(found.index_select(dim, rest), expected.index_select(dim, rest))


def test_row_kernels_strided_input_equals_contiguous() -> None:
    """In a model, inputs are slices of the output of stacked projections."""
    wide = bf16(COUNT, 1000)
    x, delta, heads = wide[:, 10:266], wide[:, 300:556], wide[:, 600:].view(COUNT, 5, 80)[:, 1:3]
    angles = bf16(2, COUNT, 1, 80, seed=3)
    for operation in (silu_mul, gelu_tanh_mul):
        due = operation(x.contiguous(), kernels="numba")
        assert torch.equal(operation(x, kernels="numba"), due)
        parts = operation(x.view(3, 100, 256), kernels="numba")
        assert torch.equal(parts, due.view(3, 100, 128))
    for found, due in zip(
        add_rms_norm(x, delta, WEIGHT, 1e-5, kernels="numba"),
        add_rms_norm(x.contiguous(), delta.contiguous(), WEIGHT, 1e-5, kernels="numba"),
        strict=True,
    ):
        assert torch.equal(found, due)
    assert torch.equal(
        rms_norm(heads, WEIGHT[:80], 1e-5, kernels="numba"),
        rms_norm(heads.contiguous(), WEIGHT[:80], 1e-5, kernels="numba"),
    )
    norm = HeadNorm(WEIGHT[:80], WEIGHT[80:160], 1e-5)
    found = norm_and_rotate(heads, 1, None, norm, kernels="numba")
    for head, weight in enumerate((norm.q_weight, norm.k_weight)):
        due = rms_norm(heads[:, head].contiguous(), weight, 1e-5, kernels="numba")
        assert torch.equal(found[:, head], due)
    assert torch.equal(
        apply_rotary(heads, angles[0], angles[1], kernels="numba"),
        apply_rotary(heads.contiguous(), angles[0], angles[1], kernels="numba"),
    )


@pytest.mark.parametrize(("operation", "exact"), [(plain_gelu, "none"), (plain_gelu_tanh, "tanh")])
def test_gelu_in_fp32_is_within_a_millionth_of_float64(operation: Operation, exact: str) -> None:
    x = torch.linspace(-12, 12, 100_001)
    due = torch.nn.functional.gelu(x.double(), approximate=exact)
    error = (operation(x[None], kernels="numba")[0] - due).abs()
    assert (error <= 1e-6 * (1 + x.abs())).all()


def test_layer_norm_in_fp32_keeps_a_small_variance_around_a_large_mean() -> None:
    x = 1000 + torch.randn(4, 384, generator=torch.Generator().manual_seed(3))
    weight, bias = torch.rand(384), torch.rand(384)
    due = torch.nn.functional.layer_norm(x.double(), (384,), weight.double(), bias.double(), 1e-12)
    found = layer_norm(x, weight, bias, 1e-12, kernels="numba")
    torch.testing.assert_close(found.double(), due, rtol=0, atol=2e-4)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_runner_uses_row_kernels_only_with_numba_backend(
    backend: str, calls: list[object], tmp_path: Path
) -> None:
    """Its warm-up calls all kernels of the model."""
    runner = load(tiny_llama(tmp_path), attention_backend=backend)
    assert runner.rows.kernels == backend
    assert len(set(calls)) == (3 if backend == "numba" else 0)
    del calls[:]
    silu_mul(bf16(2, 64), kernels="torch")
    assert not calls, "a runner must not change the implementation of other calls"


def test_norm_bits_do_not_depend_on_where_its_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's loop that sums in another order is taken only if arrays are far apart."""
    size, gap = 32, 8  # fewer bytes than that loop takes at once
    room = torch.zeros(4, size + gap)
    x, delta, total, out = room[:, None, :size].unbind()
    for seed in range(8):
        given = torch.randn(2, 1, size, generator=torch.Generator().manual_seed(seed))
        _, due = rows.norm(given[0].clone(), given[1].clone(), None, 1e-5)
        x.copy_(given[0])
        delta.copy_(given[1])
        empties = iter((out, total))
        with monkeypatch.context() as patch:
            patch.setattr(rows.torch, "empty", lambda *_, made=empties, **__: next(made))
            _, found = rows.norm(x, delta, None, 1e-5)
        assert torch.equal(found, due), seed
