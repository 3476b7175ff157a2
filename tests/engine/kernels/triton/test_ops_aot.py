"""The kernels behind `engine.ops`, as models launch them, compile without spilling."""

from __future__ import annotations

import pytest

from tests.engine.kernels.triton.codes_launches import KINDS
from tests.engine.kernels.triton.recurrence_launches import STEPS
from tests.support.aot import compile_ahead

KERNELS = {
    *("_norm_kernel", "_activation_kernel", "_gather_kernel", "_linear_kernel", "_rotate_kernel"),
    *("_softcap_kernel", "_chunk_kernel", "_pick_kernel", "_inputs_kernel"),
}


@pytest.mark.slow
def test_ops_kernels_of_benchmarked_models_compile_without_spills() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.ops_launches", "benchmarked")
    assert {report.kernel for report in reports} == KERNELS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ops_kernels_of_published_models_compile_without_spills() -> None:
    """Every served architecture, and other dtypes for one model."""
    assert len(compile_ahead("tests.engine.kernels.triton.ops_launches", "published")) > 140


@pytest.mark.slow
def test_experts_kernel_compiles_without_spills() -> None:
    """As two models launch it, and each tile in each dtype."""
    reports = compile_ahead("tests.engine.kernels.triton.ops_launches", "experts")
    assert "_experts_kernel" in {report.kernel for report in reports}
    reports = compile_ahead("tests.engine.kernels.triton.experts_launches", "everything")
    assert {report.kernel for report in reports} == {"_experts_kernel"}


@pytest.mark.slow
def test_lora_kernels_compile_without_spills() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.lora_launches", "everything")
    assert {report.kernel for report in reports} == {"_shrink_kernel", "_expand_kernel"}


@pytest.mark.slow
def test_kernels_of_recurrent_layers_compile_without_spills() -> None:
    """Decodes have the machine code of chunks, so a token has the same bits in both."""
    reports = compile_ahead("tests.engine.kernels.triton.recurrence_launches", "everything")
    assert {report.kernel for report in reports} == {
        *("_conv_kernel", "_recurrence_kernel", "_gated_norm_kernel", "_sigmoid_mul_kernel")
    }
    for report in reports:
        for tokens in STEPS:
            assert f"of {tokens}," in f"{report.used_by},", report


@pytest.mark.slow
def test_codes_kernel_compiles_without_spills() -> None:
    """Quantised weights in bf16: one row and many, with and without a bias."""
    reports = compile_ahead("tests.engine.kernels.triton.codes_launches", "in_bf16")
    assert {report.kernel for report in reports} == {"_codes_kernel"}
    assert len(reports) == 2 * 2 * 2 * len(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_codes_kernel_of_every_form_dtype_and_tile_compiles_without_spills() -> None:
    assert len(compile_ahead("tests.engine.kernels.triton.codes_launches", "everything")) > 100
