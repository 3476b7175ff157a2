"""The kernel for few rows of a linear layer: oneDNN's own bits, from oneDNN's own bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu import linear
from engine.kernels.cpu.intrinsics import AVX512_BF16
from engine.kernels.cpu.linear import FEW_ROWS, few_rows
from engine.layers.embedding import LMHead
from engine.layers.linear import PACKING_ROWS, Linear, PackedWeight
from engine.platform import multiplies_in_amx
from tests.ops.test_invariance import cancelling

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not AVX512_BF16, reason="this CPU does not multiply bf16 (AVX512_BF16)"),
]
# Inputs and outputs: those of real layers, sums begun anew once and more, and an odd rest.
SIZES = [(64, 64), (576, 960), (1216, 128), (1536, 576), (2048, 512), (4096, 128), (576, 32000)]


def packed(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---- equal bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_of_onednn(sizes: tuple[int, int], biased: bool) -> None:
    """Of products that are zero but for rounding, and of any, in every number of rows."""
    inputs, outputs = sizes
    bias = bf16(outputs, seed=1) if biased else None
    for x, weight in (
        [tensor.bfloat16() for tensor in cancelling(128, *sizes)],
        [bf16(128, inputs, seed=2), bf16(outputs, inputs, seed=3)],
    ):
        ours = PackedWeight(weight, bias, compiled=True)
        assert ours._most == FEW_ROWS, "the kernel is not used"
        together = PackedWeight(weight, bias)(x)
        assert together.any()
        for count in range(1, FEW_ROWS + 1):
            for first in (0, 128 - count):
                rows = slice(first, first + count)
                assert torch.equal(ours(x[rows]), together[rows]), f"{count} rows"
        assert torch.equal(ours(x), together), "more rows are oneDNN's"


def test_rows_that_lie_apart() -> None:
    """As where a layer gets some columns of another's outputs."""
    x, weight = bf16(3, 192)[:, 64:128], bf16(64, 64, seed=1)
    ours = few_rows(weight, packed(weight), None)
    assert ours
    assert torch.equal(ours(x), ours(x.contiguous()))


def test_numbers_that_are_none() -> None:
    """One row's do not reach another's."""
    x, weight = bf16(4, 64), bf16(64, 64, seed=1)
    ours = few_rows(weight, packed(weight), None)
    assert ours
    right = ours(x)
    x[1], x[2, 5] = float("nan"), float("inf")
    found = ours(x)
    assert torch.equal(found[[0, 3]], right[[0, 3]])
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


def test_many_threads() -> None:
    """More than there are panels: some find nothing to do."""
    x, weight = bf16(2, 576), bf16(192, 576, seed=1)
    expected = PackedWeight(weight)(x)
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        ours = PackedWeight(weight, compiled=True)
        for _ in range(20):
            assert torch.equal(ours(x), expected)


# ---- where it is used ------------------------------------------------------------------------


def test_layers() -> None:
    x = bf16(2, 64)
    layer, head = Linear(64, 128, bias=True), LMHead(256, 64)
    for module in (layer, head):
        for parameter in module.parameters():
            parameter.data = bf16(*parameter.shape, seed=1)
        expected = module(x).bfloat16()
        module.prepack(compiled=True)
        assert module._packed
        assert module._packed._few_rows
        torch.testing.assert_close(module(x), expected, rtol=2**-6, atol=2**-6)


def test_what_it_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(weight: torch.Tensor) -> bool:
        return few_rows(weight, packed(weight), None) is not None

    assert used(bf16(128, 64))
    assert not used(torch.randn(128, 64)), "fp32"
    assert not used(bf16(100, 64)), "no whole panels"
    assert not used(bf16(128, 63)), "no whole pairs"
    assert not used(bf16(128, 1000)), "rows that oneDNN fills up"
    assert not used(torch.ones(128, 64).bfloat16()), "any width of panels would explain these"
    monkeypatch.setattr(linear, "AVX512_BF16", False)
    assert not used(bf16(128, 64)), "a CPU without the instructions"


def test_another_order_of_summation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A oneDNN that sums as no known one does is left alone."""
    monkeypatch.setattr(linear, "_splits", {})
    monkeypatch.setattr(linear, "SPLITS", (8,))
    weight = bf16(512, 1024)
    assert few_rows(weight, packed(weight), None) is None


def test_another_order_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = bf16(128, 64)
    assert few_rows(weight, packed(weight.flip(0)), None) is None


WITH_AMX = """
import torch
from engine.layers.linear import PackedWeight
from tests.ops.test_few_rows import SIZES, bf16
for inputs, outputs in SIZES:
    x, weight, bias = bf16(4, inputs), bf16(outputs, inputs, seed=1), bf16(outputs, seed=2)
    ours = PackedWeight(weight, bias, compiled=True)
    assert ours._most == 4, (inputs, outputs, ours._most)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for rows in range(1, 5):
        torch.testing.assert_close(ours(x[:rows]).double(), exact[:rows], rtol=2**-7, atol=2**-4)
print("close")
"""


@pytest.mark.skipif(
    "amx_bf16" not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"),
    reason="this CPU has no AMX",
)
def test_panels_of_amx() -> None:
    """They have another width, and no bits to compare with."""
    ran = subprocess.run(
        [sys.executable, "-c", WITH_AMX],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "DEFAULT"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "close\n", ran.stderr
    assert not multiplies_in_amx(torch.device("cpu"), torch.bfloat16), "the other tests are without"
