"""Graphs of graphs steps (decodes and prefill chunks): their shapes, and the memory they write.

Bitwise equality of generated tokens is tested by the goldens and by the engine's tests in the modes
`captured`. The driver captures a shape as soon as a step needs it, so that they replay every step
that has a shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory.graph_shapes import GraphShape, mixed_shapes
from engine.runner import model_runner
from engine.runner.step_graphs import CHUNKS, StepGraphs
from engine.scheduling.step import ScheduledSlice, Step
from tests.support.driver import Driver

pytestmark = pytest.mark.usefixtures("one_thread")
SENTINEL = 77.0
BUSY: dict[str, Any] = {"block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 40}


def captured(checkpoint: Path, **config: Any) -> tuple[Driver, StepGraphs]:
    driver = Driver(checkpoint, captured=True, **config)
    assert driver.runner.graphs
    return driver, driver.runner.graphs


def step_of(*counts: int) -> Step:
    return Step(tuple(ScheduledSlice(n, 0, n, 0, count, True) for n, count in enumerate(counts)))


@pytest.mark.parametrize(
    ("limits", "decodes", "tokens"),
    [
        ((1, 16), [0], [16]),
        ((12, 40), [0, 8, 11], [16, 32, 40]),
        ((300, 9000), [0, 8, 32, 64, 128, 256], [16, 32, 64, 128, 256, 512, 1024, 2048]),
    ],
)
def test_mixed_shapes_follow_limits(
    limits: tuple[int, int], decodes: list[int], tokens: list[int]
) -> None:
    assert mixed_shapes(*limits) == [GraphShape(d, t) for t in tokens for d in decodes]


def test_shape_for_returns_smallest_shape_that_fits(checkpoint: Path) -> None:
    _, graphs = captured(checkpoint, max_num_seqs=17)
    assert graphs.shape_for(step_of(16)) == GraphShape(0, 16)
    assert graphs.shape_for(step_of(1, 17)) == GraphShape(8, 32)
    assert graphs.shape_for(step_of(*[1] * 9, 200, 50, 1)) == GraphShape(16, 256)
    assert graphs.shape_for(step_of(*[2] * CHUNKS)) == GraphShape(0, 2 * CHUNKS)
    assert graphs.shape_for(step_of(*[2] * (CHUNKS + 1))) is None
    assert graphs.shape_for(step_of(257)) is None
    assert graphs.shape_for(step_of(1, 1)) == GraphShape(2), "decode steps have their own graphs"


def test_idle_turns_capture_mixed_graphs_after_decode_graphs(checkpoint: Path) -> None:
    driver, graphs = captured(checkpoint, max_num_seqs=2, max_num_batched_tokens=20)
    assert not any(map(graphs.is_captured, graphs.mixed)), "a graphs graph was captured at start"
    driver.turn(4 + 2)  # decodes of 3, 5, 6 and 7 rows come first
    assert [graphs.is_captured(shape) for shape in graphs.mixed] == [False, False, True, True]
    driver.turn(2)
    assert all(map(graphs.is_captured, graphs.mixed))
    assert not driver.runner.capture_when_idle()


def test_mixed_capture_out_of_memory_keeps_existing_graphs(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver, graphs = captured(checkpoint, max_num_seqs=2, max_num_batched_tokens=20)
    driver.turn(4 + 2)

    def taken(shape: GraphShape) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 MiB")

    graphs.capture = taken  # type: ignore[method-assign]
    driver.turn(3)
    assert "2.00 MiB" in caplog.text
    assert len(caplog.records) == 1, "the capture was tried more than once"
    assert [graphs.is_captured(shape) for shape in graphs.mixed] == [False, False, True, True]
    request = driver.submit(list(range(3, 16)), max_tokens=4)
    graphs.mixed.clear()  # else the driver captures the shape that a step needs
    driver.run()
    assert len(driver.tokens(request)) == 4


def test_mixed_step_without_graph_runs_eagerly(checkpoint: Path) -> None:
    """Without the driver's captures, only decode steps are replayed, with one graph each."""
    driver, graphs = captured(checkpoint, max_num_seqs=2)
    graphs.capture = lambda shape: None  # type: ignore[method-assign]
    request = driver.submit([1, 2, 3], 5)
    driver.run()
    assert driver.tapes
    assert (len(driver.tokens(request)), driver.tapes.replays) == (5, 4)


@torch.inference_mode()
def test_mixed_graph_slots_without_sampling_hold_padding_row(checkpoint: Path) -> None:
    """Otherwise the row that had this slot in the previous step would get a token."""
    driver, graphs = captured(checkpoint, max_num_seqs=40)
    inputs, padding = graphs.inputs, driver.runner.rows.padding
    step = step_of(1, 1, 5)
    shape = graphs.shape_for(step)
    assert shape == GraphShape(8, 16)
    graphs.capture(shape)
    inputs.send(GraphShape(40), step_of(*[1] * 40).slices)
    assert inputs.drawn_rows.tolist() == list(range(40))
    graphs.compute(shape, step.slices, draws=True)
    sampling = [0, 1, 2, *[padding] * 37]
    assert inputs.row_ids.tolist() == inputs.drawn_rows.tolist() == sampling
    graphs.compute(shape, step.slices, draws=False)
    assert inputs.row_ids.tolist() == sampling
    assert inputs.drawn_rows.tolist() == [padding] * 40


def answers(driver: Driver) -> list[list[int]]:
    """Return the tokens of prompts that arrive during decode; some share a prefix."""
    ids = []
    for number in range(6):
        prompt = [(7 * i + number % 4) % 600 for i in range(20 + 9 * number)]
        seeded = {"temperature": 1.0, "seed": number} if number % 2 else {}
        ids.append(driver.submit(prompt, 20, **seeded))
        driver.turn(2)
    driver.run()
    ids.append(driver.submit([7 * i % 600 for i in range(50)], 4, logprobs=1))
    driver.run()
    return [driver.tokens(i) for i in ids]


@pytest.mark.parametrize("blocks", [None, 7], ids=["", "preempted"])
@pytest.mark.variants(1)
def test_mixed_graphs_replayed_steps_equal_eager(
    checkpoint: Path, blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BUSY | {"num_gpu_blocks_override": blocks, "max_model_len": 96}
    eager = Driver(checkpoint, **config)
    due = answers(eager)
    driver, graphs = captured(checkpoint, depth=1, late=True, **config)

    def refused(step: Any, *_: Any) -> None:
        raise AssertionError(f"not replayed: {step}")

    monkeypatch.setattr(model_runner, "build_batch", refused)
    assert answers(driver) == due
    assert driver.stats.prefix_hits > 0
    assert (driver.stats.preemptions > 0) == (blocks is not None)
    assert len([shape for shape in graphs.mixed if graphs.is_captured(shape)]) > 3
    driver.check_static()


def test_mixed_graph_padding_writes_only_null_block(checkpoint: Path) -> None:
    """Three decodes and two chunks in a graph for 8 decodes and 32 tokens."""
    driver, graphs = captured(checkpoint, depth=0, **BUSY)
    for n in range(8):  # five end early: their rows must leave the step
        driver.submit([1, 2, 3 + n], 30 if n < 3 else 2)
    driver.turn(3)
    for n in range(2):
        driver.submit([5 + n] * 9, 8)
    scheduler, kv, rows = driver.core.scheduler, driver.runner.kv, driver.runner.rows
    assert len(scheduler.running) == 3
    for layer in kv.layers:  # the step zeroes newly allocated blocks and no others
        layer.keys[1:], layer.values[1:] = SENTINEL, SENTINEL
    tokens, lengths = rows.tokens.clone(), rows.lengths.clone()
    places = {s.id: s.num_computed for s in scheduler.running}
    driver.turn()
    assert graphs.is_captured(GraphShape(8, 32)), "the step was not replayed"
    written, scrubbed = set(), set()
    for s in scheduler.running:
        for position in range(places.get(s.id, 0), s.num_computed):
            written.add((s.tables[0][position // 16], position % 16))
        scrubbed |= set() if s.id in places else set(s.tables[0])
    for layer in kv.layers:
        for held in (layer.keys, layer.values):
            changed = (held != SENTINEL).any(3).any(1).nonzero().tolist()
            assert {(b, o) for b, o in changed if b and b not in scrubbed} | {
                (b, o) for b, o in written if b in scrubbed
            } == written
            for block in scrubbed:
                beyond = [o for o in range(16) if (block, o) not in written]
                assert not held[block, :, beyond].any(), "padding wrote into a zeroed block"
    live = [s.row for s in scheduler.running]
    rest = [row for row in range(rows.padding + 1) if row not in live]
    assert torch.equal(rows.tokens[rest[:-1]], tokens[rest[:-1]])
    assert torch.equal(rows.lengths[rest], lengths[rest])
    assert not rows.block_tables[:, rows.padding].any()
