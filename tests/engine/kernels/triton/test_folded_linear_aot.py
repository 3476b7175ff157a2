"""Folded linear layers compile without spills, and overlap with the kernel before them."""

from __future__ import annotations

import pytest

from engine.kernels.triton import folded_kernel, linear
from tests.support.aot import Report, compile_ahead
from tests.support.ptx import first_events

WEIGHTS = {"load weight_ptr", "prefetch weight_ptr"}
NUM_SMS = 132  # of an H200
PTX = """
.visible .entry kernel(
)
{
	.reg .b32 %r<9>;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	griddepcontrol.launch_dependents; // dummy %r1
	mad.wide.u32 	%rd3, %r4, 2, %rd2;
	@%p1 ld.global.v4.b32 { %r31, %r32, %r33, %r34 }, [ %rd3 + 0 ];
	griddepcontrol.wait; // dummy %r2
	add.s64 	%rd4, %rd1, %rd9;
	@%p1 ld.global.b32 { %r35 }, [ %rd4 + 0 ];
	@%p2 bra 	$L__BB0_2;
	ld.global.b32 { %r36 }, [ %rd3 + 0 ];
"""


def check_overlap(reports: list[Report]) -> None:
    for report in reports:
        if report.arch == 80:
            assert not report.waits
            continue
        assert report.before_wait is not None, f"waits behind a branch: {report}"
        assert report.waits == 1
        first, *rest = report.before_wait
        assert first == "trigger", report
        assert "load weight_ptr" in rest, f"no early weights: {report}"
        assert set(rest) <= {"trigger", *WEIGHTS}, report
        if "prefetch weight_ptr" in rest:
            early = folded_kernel.EARLY.value
            assert early <= report.programs * NUM_SMS, f"not all start early: {report}"
        for instruction in report.atomics:
            assert ".gpu." in instruction, report
            assert ".acq_rel." in instruction, report


def test_events_of_ptx_have_the_pointers_they_come_from() -> None:
    found = first_events(PTX, ["x_ptr", "weight_ptr"])
    assert found == ["trigger", "load weight_ptr", "wait", "load x_ptr"]
    assert first_events(PTX.replace("%rd3, %r4, 2, %rd2", "%rd3, %r4, 2, %rd1"), ["x_ptr"])[
        1:3
    ] == [
        "load x_ptr",
        "wait",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_folded_layers_of_the_smallest_model_compile_and_read_weights_before_they_wait() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.folded_launches", "benchmarked")
    assert {report.kernel for report in reports} == {"folded_linear_kernel"}
    check_overlap(reports)
    assert any(report.atomics for report in reports), "no inputs are shared"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_folded_layers_of_published_sizes_compile_and_read_weights_before_they_wait() -> None:
    reports = compile_ahead("tests.engine.kernels.triton.folded_launches", "published")
    check_overlap([report for report in reports if "Features" not in report.used_by])


@pytest.mark.slow
def test_kernels_trigger_the_next_one_before_they_wait() -> None:
    """They wait before they read anything."""
    reports = compile_ahead("tests.engine.kernels.triton.folded_launches", "small_kernels")
    early = [report for report in reports if report.arch == 90]
    assert {report.kernel for report in early} == {"_norm_kernel", "_activation_kernel"}
    for report in early:
        assert report.before_wait == ["trigger"]
        assert report.waits == 1


@pytest.mark.slow
def test_linear_prefetches_weights_in_no_more_programs_than_start_early() -> None:
    """The kernel without folding: programs that start later would read a weight twice."""
    reports = compile_ahead("tests.engine.kernels.triton.folded_launches", "of_few_rows")
    (report,) = [each for each in reports if each.arch == 90]
    assert report.waits == 1
    assert linear.EARLY.value <= report.programs * NUM_SMS
