"""A first start says how many kernels it compiles, and how long that will take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.machine_code import KernelStore, MachineCode, kernel_store
from engine.memory.model_plan import ModelPlan
from engine.protocol.ready import Progress
from engine.runner import kernel_progress
from engine.runner.kernel_progress import FIRST_SECONDS, CompileProgress, usual_seconds
from engine.runner.load import load_engine
from engine.runner.needed_kernels import needed_kernels

ATTENTION = ("attention.attention_kernel", 1, 1)
NORM = ("rowwise.rows_kernel", 0, 1)
PROGRAM = ("program.program_kernel",)


def compile_each(store: KernelStore, needed: set[Kernel], *kernels: Kernel) -> list[Progress]:
    """Report kernels that take twice their usual time to compile."""
    reported: list[Progress] = []
    progress = CompileProgress(store, needed, reported.append)
    for kernel in kernels:
        progress.begin(kernel)
        if not store.compile_seconds:
            store.compile_seconds = 2 * FIRST_SECONDS
        store.compile_seconds += 2 * usual_seconds(kernel)
    return reported


def test_progress_has_no_estimate_before_a_kernel_is_compiled_then_the_measured_pace() -> None:
    needed = {ATTENTION, NORM, PROGRAM}
    first, second, third = compile_each(KernelStore(None), needed, NORM, ATTENTION, PROGRAM)
    assert first.stage.endswith("once: 1 of 3")
    left = round(2 * (usual_seconds(ATTENTION) + usual_seconds(PROGRAM)))
    assert second.stage.endswith(f"once: 2 of 3, about {left} s left")
    assert third.stage.endswith("once: 3 of 3, about 1 s left")
    assert [progress.fraction for progress in (first, second, third)] == [0.0, 1 / 3, 2 / 3]


def test_progress_counts_a_kernel_that_was_not_expected() -> None:
    stages = [p.stage for p in compile_each(KernelStore(None), {NORM}, ATTENTION, PROGRAM, NORM)]
    assert [re.findall(r"\d+ of \d+", stage) for stage in stages] == [
        ["1 of 2"],
        ["2 of 3"],
        ["3 of 3"],
    ]


def test_progress_counts_no_kernel_that_an_earlier_start_compiled(tmp_path: Path) -> None:
    KernelStore(tmp_path).address(*PROGRAM)
    (first,) = compile_each(KernelStore(tmp_path), {PROGRAM, NORM}, NORM)
    assert first.stage.endswith("1 of 1")


class HalfDone(KernelStore):
    """A store without a folder, with the kernels `done`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.done: set[Kernel] = set()

    def has(self, kernel: Kernel) -> bool:
        return kernel in self.done


def test_progress_of_kernels_compiled_ahead_counts_them_and_estimates_by_their_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(kernel_progress.time, "monotonic", lambda: now)
    store, reported = HalfDone(), []
    progress = CompileProgress(store, {ATTENTION, NORM, PROGRAM}, reported.append)
    assert progress.missing == [ATTENTION, NORM, PROGRAM], "the slowest one begins first"
    progress.begin_ahead(2)
    progress.wait()
    progress.wait()
    # The second process takes twice the usual time for NORM, while the first has ATTENTION.
    now += 2 * (FIRST_SECONDS + usual_seconds(NORM))
    store.done = {NORM}
    progress.wait()
    left = round(2 * (usual_seconds(ATTENTION) - usual_seconds(NORM)))
    assert [each.stage.rpartition("once: ")[2] for each in reported] == [
        "1 of 3",
        f"2 of 3, about {left} s left",
    ]
    assert progress.count == 1
    store.done = {NORM, ATTENTION, PROGRAM}
    progress.wait()
    assert reported[-1].stage.endswith("3 of 3, about 1 s left")
    assert progress.count == 3


def test_progress_counts_a_kernel_once_that_was_given_up_and_compiled_here() -> None:
    store = HalfDone()
    progress = CompileProgress(store, {NORM, PROGRAM}, lambda progress: None)
    progress.begin_ahead(1)
    progress.begin(NORM)
    store.done = {NORM, PROGRAM}
    assert progress.count == 2


@pytest.mark.parametrize(
    "flags",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int4"}],
    ids=lambda flags: next(iter(flags.values())),
)
def test_needed_kernels_are_exactly_those_that_loading_requests(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model="demo", max_model_len=64, threads=1, num_gpu_blocks_override=8, **flags
    )
    plan = ModelPlan(config)
    if plan.kernels != "numba":
        pytest.skip("this machine computes with torch")
    store = kernel_store()
    requested: set[Kernel] = set()
    find = store._find

    def recorded(name: str, shape: tuple[int, ...]) -> MachineCode:
        requested.add((name, *map(int, shape)))
        return find(name, shape)

    monkeypatch.setattr(store, "_addresses", {})
    monkeypatch.setattr(store, "_find", recorded)
    needed = needed_kernels(plan)
    load_engine(config)
    assert needed == requested
