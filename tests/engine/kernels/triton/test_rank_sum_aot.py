"""Sums of ranks compile without spilling, fit on a GPU at once, and order their memory accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from engine.kernels.triton.rank_sum import BLOCK_BYTES, programs_of
from tests.engine.kernels.triton import rank_sum_launches
from tests.engine.kernels.triton.rank_sum_launches import SIZES
from tests.support.aot import compile_ahead

SMS = {80: 108, 90: 114}  # of an A100, and of the smallest H100
BEFORE = ["load", "store", "barrier", "load", "release", "load"]
BEHIND = ["barrier", "acquire", "barrier", "read a part", "narrow store"]  # the number of the sum


@pytest.mark.slow
def test_all_programs_of_a_sum_are_on_the_device_at_once() -> None:
    """They wait for programs of other ranks, which may be on the device in another order."""
    reports = compile_ahead(rank_sum_launches.__name__, "everything")
    assert {report.kernel for report in reports} == {"_rank_sum_kernel", "_rank_sum_norm_kernel"}
    for report in reports:
        places = report.programs * SMS[report.arch]
        block_bytes = BLOCK_BYTES
        if report.kernel == "_rank_sum_norm_kernel":
            [size] = [size for size in SIZES if f" 1 x {size} and norm" in report.used_by]
            block_bytes = 2 * size
        assert places >= programs_of(block_bytes), report


@pytest.mark.slow
def test_part_is_written_before_its_flag_and_read_behind_the_flags_of_others() -> None:
    """The flags are released and acquired for all GPUs; threads of a program wait in between."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", rank_sum_launches.__name__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 2 * (1 + len(SIZES))
    for kernel, arch, events in kernels:
        due = BEFORE + BEHIND
        if arch == 90:
            due = ["wait for inputs", *due]
        assert events[: len(due)] == due, kernel
        assert not {"release", "acquire", "read a part"}.intersection(events[len(due) :])
