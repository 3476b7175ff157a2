"""The kernel of linear layers reads oneDNN's packed weight and equals its bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.device.facts import uses_amx
from engine.kernels.numba import linear
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.linear import ANY_ROWS, KnownSplits, PackedMultiply, multiply_for
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.layers.weights.head import HeadWeight
from engine.layers.weights.onednn import PACKING_ROWS, PackedWeight
from engine.ops.kernels import use_kernels
from tests.engine.ops.test_invariance import cancelling

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not has_avx512_bf16(), reason="this CPU does not multiply bf16 (AVX512_BF16)"
    ),
]
# (inputs, outputs): sizes of real layers, sums in two and more splits, and an odd remainder.
SIZES = [(64, 64), (576, 960), (1216, 128), (1536, 576), (2048, 512), (4096, 128), (576, 32000)]


def packed(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---- equal bits ------------------------------------------------------------------------------


@pytest.mark.variants(7)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_equals_onednn_bitwise(sizes: tuple[int, int], biased: bool) -> None:
    """With products that are zero up to rounding and random ones, for every number of rows."""
    inputs, outputs = sizes
    bias = bf16(outputs, seed=1) if biased else None
    for x, weight in (
        [tensor.bfloat16() for tensor in cancelling(256, *sizes)],
        [bf16(256, inputs, seed=2), bf16(outputs, inputs, seed=3)],
    ):
        ours = PackedWeight(weight, bias, kernels="numba")
        assert ours._max_rows == ANY_ROWS, "the kernel is not used"
        together = PackedWeight(weight, bias)(x)
        assert together.any()
        for count in (*range(1, 10), 13, 33, 65, 129, 256):
            for first in (0, 256 - count):
                rows = slice(first, first + count)
                assert torch.equal(ours(x[rows]), together[rows]), f"{count} rows"
        assert torch.equal(ours(x), together), "oneDNN must compute more rows"


def test_kernel_strided_input_equals_contiguous() -> None:
    """A layer may get a slice of another layer's output columns."""
    x, weight = bf16(3, 192)[:, 64:128], bf16(64, 64, seed=1)
    ours = multiply_for(weight, packed(weight), None)
    assert ours
    assert torch.equal(ours(x), ours(x.contiguous()))


def test_kernel_nan_and_inf_stay_in_their_row() -> None:
    """NaN or infinity in one row must not change other rows."""
    x, weight = bf16(4, 64), bf16(64, 64, seed=1)
    ours = multiply_for(weight, packed(weight), None)
    assert ours
    right = ours(x)
    x[1], x[2, 5] = float("nan"), float("inf")
    found = ours(x)
    assert torch.equal(found[[0, 3]], right[[0, 3]])
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


def test_kernel_in_many_threads_equals_onednn() -> None:
    """There are more threads than panels, so that some threads have no work."""
    x, weight = bf16(2, 576), bf16(192, 576, seed=1)
    expected = PackedWeight(weight)(x)
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        ours = PackedWeight(weight, kernels="numba")
        for _ in range(20):
            assert torch.equal(ours(x), expected)


# ---- where it is used ------------------------------------------------------------------------


def test_linear_and_lm_head_prepacked_use_the_kernel() -> None:
    x = bf16(2, 64)
    layer, head = Linear(64, 128, bias=True), LMHead(256, 64)
    for module in (layer, head):
        for parameter in module.parameters():
            parameter.data = bf16(*parameter.shape, seed=1)
        expected = module(x)
        use_kernels(module, "numba")
        module.prepack()
        assert module.tensors.packed
        torch.testing.assert_close(module(x), expected, rtol=2**-6, atol=2**-6)
    assert isinstance(layer.tensors.packed, PackedWeight)
    assert isinstance(layer.tensors.packed._kernel, PackedMultiply)
    assert isinstance(head.tensors.packed, HeadWeight)
    assert isinstance(head.tensors.packed._product, PackedMultiply)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 100])
def test_logits_are_not_rounded_and_round_to_onednns(rows: int) -> None:
    """Rounded logits would make the best two tokens equal."""
    x, head = bf16(rows, 576), LMHead(512, 576)
    assert head.weight is not None
    head.weight.data = bf16(512, 576, seed=1)
    weight = head.table.data.clone()
    use_kernels(head, "numba")
    head.prepack()
    found = head(x)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), PackedWeight(weight)(x))
    exact = x.double() @ weight.double().t()
    assert (found - exact).abs().max() < 1e-3 < (found.bfloat16() - exact).abs().max()


def test_kernel_unsupported_weight_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(weight: torch.Tensor) -> bool:
        return multiply_for(weight, packed(weight), None) is not None

    assert used(bf16(128, 64))
    assert not used(torch.randn(128, 64)), "fp32 is not supported"
    assert not used(bf16(100, 64)), "outputs must fill whole panels"
    assert not used(bf16(128, 63)), "inputs must fill whole pairs"
    assert not used(bf16(128, 1000)), "oneDNN pads rows of this size"
    assert not used(torch.ones(128, 64).bfloat16()), "equal weights do not show the panel width"
    monkeypatch.setattr(linear, "has_avx512_bf16", lambda: False)
    assert not used(bf16(128, 64)), "the CPU must have AVX512_BF16"


def test_kernel_unknown_summation_order_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """If oneDNN's order of summation is unknown, the kernel is not used."""
    monkeypatch.setattr(linear, "known_splits", KnownSplits)
    monkeypatch.setattr(linear, "SPLITS", (8,))
    weight = bf16(512, 1024)
    assert multiply_for(weight, packed(weight), None) is None


def test_kernel_unknown_packing_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = bf16(128, 64)
    assert multiply_for(weight, packed(weight.flip(0)), None) is None


WITH_AMX = """
import sys, torch
from engine.kernels.numba import linear
from engine.layers.weights.onednn import PackedWeight
from tests.engine.kernels.numba.test_linear import SIZES, bf16
most = 4
if sys.argv[1] == "tiles":
    assert linear.tiles_problem() is None, linear.tiles_problem()
    most = linear.ANY_ROWS
else:
    linear.tiles_problem = lambda: "vectors are tested"
for inputs, outputs in SIZES:
    x, weight, bias = bf16(4, inputs), bf16(outputs, inputs, seed=1), bf16(outputs, seed=2)
    ours = PackedWeight(weight, bias, kernels="numba")
    assert ours._max_rows == most, (inputs, outputs, ours._max_rows)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for rows in range(1, 5):
        torch.testing.assert_close(ours(x[:rows]).double(), exact[:rows], rtol=2**-7, atol=2**-4)
print("close")
"""


@pytest.mark.skipif(
    "amx_bf16" not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"),
    reason="this CPU has no AMX",
)
@pytest.mark.parametrize("kernel", ["vectors", "tiles"])
def test_kernel_with_amx_packing_is_close_to_exact(kernel: str) -> None:
    """AMX panels have another width. Results are compared within a tolerance, not bitwise."""
    ran = subprocess.run(
        [sys.executable, "-c", WITH_AMX, kernel],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "DEFAULT"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "close\n", ran.stderr
    assert not uses_amx(torch.device("cpu"), torch.bfloat16), "other tests need AMX off"
