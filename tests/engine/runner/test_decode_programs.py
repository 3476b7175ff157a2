"""Recorded steps of decodes, from row ids to tokens: the same bits as a step through Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory.estimate import DECODE_PROGRAM_ROWS
from engine.runner.decode_programs import DecodePrograms
from engine.scheduling.step import ScheduledSlice, Step
from tests.engine.runner.test_step_programs import BUSY, CASES, SLOW, SMALL
from tests.support.driver import Driver
from tests.support.golden import Golden

pytestmark = pytest.mark.usefixtures("one_thread")
# Temperatures and cuts that the draw takes.
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 9},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
]


def decodes_of(driver: Driver) -> DecodePrograms:
    found = driver.runner.decodes
    assert isinstance(found, DecodePrograms)
    return found


def replayed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of rows of the steps that programs compute from now on."""
    decodes = decodes_of(driver)
    counts: list[int] = []
    compute = DecodePrograms.__call__

    def noting(self: DecodePrograms, step: Step) -> torch.Tensor | None:
        tokens = compute(self, step)
        if tokens is not None and self is decodes:
            counts.append(len(step.slices))
        return tokens

    monkeypatch.setattr(DecodePrograms, "__call__", noting)
    return counts


def traffic(driver: Driver, seed: int) -> list[list[int]]:
    """Return the tokens of requests that come and go, share blocks, and are aborted."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 200) for _ in range(48)]
    ids = []
    for number in range(28):
        own = [rng.randrange(3, 200) for _ in range(rng.choice((1, 7, 20, 45)))]
        prompt = shared[: rng.choice((0, 16, 33, 48))] + own
        options = rng.choice(DRAWN)
        ids.append(driver.submit(prompt, rng.randrange(1, 32), seed=number, **options))
        driver.turn(rng.randrange(6))
        if rng.random() < 0.2:
            driver.abort(rng.choice(ids))
    driver.run()
    return [driver.tokens(request) for request in ids]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in CASES])
@pytest.mark.variants(1)
def test_recorded_decodes_equal_python(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences fill blocks, are preempted and aborted; some layers have windows."""
    folder = Golden(CASES[name], tmp_path).folder
    blocks = 44 if name.startswith("gemma") else 13
    found, due = (
        Driver(folder, dtype=dtype, num_gpu_blocks_override=blocks, **BUSY) for _ in range(2)
    )
    due.runner.decodes = None
    counts = replayed(found, monkeypatch)
    for seed in (0, 1):
        assert traffic(found, seed) == traffic(due, seed)
    assert found.stats.preemptions == due.stats.preemptions > 0
    if name in ("llama", "gemma2", "gemma4", "qwen3", "smollm3", "deepseek2"):
        assert len(set(counts)) > 2, "few programs were replayed"
        assert all(decodes_of(found)._programs.values())


def test_steps_that_need_more_than_a_draw_are_not_recorded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(checkpoint, **SMALL)
    counts = replayed(driver, monkeypatch)
    for options in ({"logprobs": 1}, {"repetition_penalty": 1.3}, {"logit_bias": ((5, 2.0),)}):
        driver.submit([3, 5, 7], 9, **options)
        driver.run()
    assert counts == []
    driver.runner.observers.append(lambda step, hidden: None)
    driver.submit([3, 5, 7], 9)
    driver.run()
    assert counts == []
    driver.runner.observers.clear()
    driver.submit([3, 5, 7], 9)
    driver.run()
    assert set(counts) == {1}


@pytest.mark.parametrize(
    "other", [{"draft": 5}, {"adapter_slot": 1}, {"count": 2}, {"samples": False}], ids=str
)
def test_slices_other_than_plain_decodes_are_not_computed(
    checkpoint: Path, other: dict[str, Any]
) -> None:
    decodes = decodes_of(Driver(checkpoint, **SMALL))
    decode = {"id": 1, "epoch": 0, "row": 0, "start": 0, "count": 1, "samples": True}
    step = Step((ScheduledSlice(**decode), ScheduledSlice(**(decode | other))))
    assert [decodes(step) for _ in range(3)] == [None] * 3
    assert not decodes._programs


def test_contended_threads_and_large_steps_compute_in_python(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = DECODE_PROGRAM_ROWS + 1
    driver = Driver(checkpoint, **(SMALL | {"max_num_seqs": count}))
    monkeypatch.setattr(driver.runner, "_poll", lambda now: None)
    counts = replayed(driver, monkeypatch)
    wait = decodes_of(driver)._openmp_wait
    wait.contended = True
    driver.submit([3, 5, 7], 9)
    driver.run()
    assert counts == []
    wait.contended = False
    for _ in range(count):
        driver.submit([3, 5, 7], 9)
    driver.run()
    assert count not in counts
    driver.submit([3, 5, 7], 9)
    driver.run()
    assert 1 in counts
