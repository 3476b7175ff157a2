"""Attention kernels, as models launch them, compile for sm_80 and sm_90a without spilling."""

from __future__ import annotations

import pytest

from tests.support.aot import compile_ahead


def test_attention_kernels_of_benchmarked_models_compile_without_spills() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.attention_launches", "benchmarked")
    kernels = {"decode_kernel", "reduce_kernel", "extend_kernel", "store_kernel"}
    assert {report.kernel for report in reports} == kernels


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_kernels_over_codes_compile_without_spills() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.attention_launches", "coded")
    kernels = {"decode_kernel", "reduce_kernel", "extend_kernel", "store_codes_kernel"}
    assert {report.kernel for report in reports} == kernels


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_attention_kernels_of_published_models_compile_without_spills() -> None:
    """Every served architecture, and fp32 and other block sizes where they differ."""
    assert len(compile_ahead("tests.engine.kernels.triton.attention_launches", "published")) > 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_for_whole_images_compile_without_spills() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.attention_launches", "whole_images")
    kernels = {"decode_kernel", "extend_kernel", "reduce_kernel", "store_kernel"}
    assert {report.kernel for report in reports} == kernels | {"store_codes_kernel"}


@pytest.mark.slow
def test_kernels_with_sinks_compile_without_spills() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.attention_launches", "with_sinks")
    assert {"decode_kernel", "extend_kernel", "reduce_kernel"} <= {r.kernel for r in reports}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_of_latent_attention_fit_small_shared_memory() -> None:
    """A key of 576 numbers is read once, so they also fit sm_86, sm_89 and sm_120."""
    reports = compile_ahead("tests.engine.kernels.triton.attention_launches", "values_in_keys")
    kernels = {"decode_kernel", "extend_kernel", "reduce_kernel", "store_kernel"}
    assert {report.kernel for report in reports} == kernels | {"store_codes_kernel"}
    assert max(report.shared for report in reports) <= 99 * 1024
