"""The fused decode attention compiles without spilling, and its PTX orders what it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from engine.kernels.triton.chips import H200
from engine.kernels.triton.decode_launch import PROGRAMS_PER_SM
from tests.support.aot import compile_ahead
from tests.support.ptx_loops import line_of, loops

LAUNCHES = "tests.engine.kernels.triton.fused_decode_launches"


@pytest.mark.slow
def test_fused_decode_of_benchmarked_models_fits_its_programs_on_a_gpu() -> None:
    """As many programs are launched as an H200 holds at once."""
    reports = compile_ahead(LAUNCHES, "benchmarked")
    assert {report.kernel for report in reports} == {"fused_decode_kernel"}
    for report in reports:
        assert report.arch != 10 * H200.capability[0] or report.programs == PROGRAMS_PER_SM


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fused_decode_of_published_models_compiles_without_spills() -> None:
    """Not one register does; `compile_ahead` lets other kernels keep two in local memory."""
    reports = compile_ahead(LAUNCHES, "published")
    assert len(reports) > 60
    assert [report for report in reports if report.local] == []


@pytest.mark.slow
def test_fused_decode_reduces_behind_an_acquire_without_waiting_split_by_split() -> None:
    """The reduction of other chips loads one split and its stats in each round of a loop."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", LAUNCHES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    ptx = json.loads(done.stdout)
    fused = ptx["fused_decode_kernel"]
    raised = line_of(fused, "atom.global.gpu.acq_rel.add.u32")
    before = "".join(fused.splitlines(keepends=True)[:raised])
    assert "bar.sync" in before[before.rindex("st.global") :], "stores of other threads come late"
    assert "prefetch.global.L2" in fused
    assert "ld.global.nc" not in fused, "such loads may be older than the counter"
    (serial,) = [loop for loop in loops(ptx["reduce_kernel"]) if loop.loads]
    assert sum(serial.loads) * 32 < 1024, "bytes that a program of one warp loads in a round"
    (chunk,) = [loop for loop in loops(fused) if loop.first > raised and loop.loads]
    assert sum(chunk.loads) * 128 >= 16384
