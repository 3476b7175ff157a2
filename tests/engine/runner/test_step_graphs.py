"""Decode graphs: the size chosen for a batch, and the memory that a replay writes.

Bitwise equality of generated tokens is tested elsewhere: for every architecture by the equality
`captured` of tests/support/golden.py, and by the engine's tests in the modes `captured`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.transfer import upload
from engine.memory.graph_shapes import AT_START, DECODE_SIZES, decode_sizes
from engine.runner.step_graphs import StepGraphs
from tests.support.driver import Driver
from tests.support.tape import TapeRecorder

pytestmark = pytest.mark.usefixtures("one_thread")
SENTINEL = 77.0


def captured(checkpoint: Path, **config: Any) -> tuple[Driver, StepGraphs, TapeRecorder]:
    driver = Driver(checkpoint, captured=True, **config)
    assert driver.runner.graphs
    assert driver.tapes
    return driver, driver.runner.graphs, driver.tapes


@pytest.mark.parametrize(
    ("max_num_seqs", "last"),
    [
        (1, [6, 7, 8]),
        (9, [7, 8, 9]),
        (20, [8, 16, 20]),
        (64, [48, 56, 64]),
        (4096, [448, 480, 512]),
    ],
)
def test_batch_sizes_end_with_max_num_seqs_or_largest_size(
    max_num_seqs: int, last: list[int]
) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes[-3:] == last
    assert sizes == sorted(set(sizes))
    assert set(sizes[:-1]) < set(DECODE_SIZES)


def test_size_for_returns_smallest_captured_size(checkpoint: Path) -> None:
    driver, graphs, _ = captured(checkpoint, max_num_seqs=70)
    assert graphs.sizes == [size for size in AT_START if size < 70] + [70]
    assert [graphs.size_for(n) for n in (1, 3, 8, 9, 65, 70, 71)] == [1, 4, 8, 16, 70, 70, None]
    known = len(graphs.sizes)
    driver.turn()
    assert len(graphs.sizes) == known + 1, "an idle turn must capture one size"
    driver.turn(len(decode_sizes(70)) - known - 1)
    assert graphs.sizes == decode_sizes(70)
    assert [graphs.size_for(n) for n in (3, 9, 17, 65)] == [3, 16, 24, 70]
    assert graphs.waiting == graphs.mixed, "shapes with chunks come after all decodes"


def test_enforce_eager_captures_no_graphs(checkpoint: Path) -> None:
    assert Driver(checkpoint, captured=True, enforce_eager=True).runner.graphs is None


def test_graphs_batch_larger_than_all_sizes_runs_eagerly(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.memory.graph_shapes.DECODE_SIZES", (1, 2, 3))
    driver, graphs, tapes = captured(checkpoint, max_num_seqs=6)
    ids = [driver.submit([5, n], 6 + n) for n in range(5)]
    driver.turn(4)
    assert not tapes.replays
    driver.run()
    assert (graphs.sizes[-1], tapes.replays > 0) == (3, True)
    eager = Driver(checkpoint)
    due = [eager.submit([5, n], 6 + n) for n in range(5)]
    eager.run()
    assert [driver.tokens(i) for i in ids] == [eager.tokens(i) for i in due]


def test_graphs_padding_rows_write_only_null_block(checkpoint: Path) -> None:
    """Five sequences in a graph of size 8: each writes one slot, and no other slot changes."""
    driver, graphs, tapes = captured(checkpoint, block_size=16)
    for n in range(8):  # three end early: their rows must leave the step
        driver.submit(list(range(1, 4 + n % 5)), 30 if n < 5 else 3)
    driver.turn(4)
    running, kv, rows = driver.core.scheduler.running, driver.runner.kv, driver.runner.rows
    assert (len(running), graphs.size_for(5)) == (5, 8)
    owned = {block for sequence in running for block in sequence.tables[0]}
    others = [block for block in range(1, kv.num_blocks + 1) if block not in owned]
    for layer in kv.layers:
        layer.keys[others] = layer.values[others] = SENTINEL
    before = [(layer.keys.clone(), layer.values.clone()) for layer in kv.layers]
    tokens, lengths = rows.tokens.clone(), rows.lengths.clone()
    places = {s.row: s.num_computed for s in running}
    replays = tapes.replays
    driver.turn()
    assert tapes.replays == replays + 1, "the step was not replayed"
    slots = {(s.tables[0][places[s.row] // 16], places[s.row] % 16) for s in running}
    for layer, was in zip(kv.layers, before, strict=True):
        for now, then in zip((layer.keys, layer.values), was, strict=True):
            changed = (now != then).any(3).any(1).nonzero().tolist()  # (block, offset)
            assert {(block, offset) for block, offset in changed if block} == slots
    used = torch.tensor(list(places))
    rest = [row for row in range(rows.padding) if row not in places]
    assert torch.equal(rows.tokens[rest], tokens[rest])
    assert torch.equal(rows.lengths[[*rest, rows.padding]], lengths[[*rest, rows.padding]])
    assert torch.equal(rows.lengths[used], lengths[used] + 1)
    assert not rows.block_tables[:, rows.padding].any()


def test_graphs_padding_row_keeps_length_one(checkpoint: Path) -> None:
    """Otherwise its length would exceed the row after a few thousand steps."""
    driver, _, _ = captured(checkpoint)
    for _ in range(3):
        driver.submit([1, 2], 200)
    driver.run()
    assert driver.runner.rows.lengths[driver.runner.rows.padding] == 1


def test_graphs_row_with_logprobs_alone_replays_one_graph(checkpoint: Path) -> None:
    """Its logits are read behind the draw, which does not change them."""
    driver, _, tapes = captured(checkpoint, max_num_seqs=4, speculation="off")
    request = driver.submit([3, 3], 9, temperature=1.0, seed=5, logprobs=2)
    driver.run()
    assert tapes.replays == 9
    eager = Driver(checkpoint, attention_backend="torch")
    due = eager.submit([3, 3], 9, temperature=1.0, seed=5, logprobs=2)
    eager.run()
    assert driver.tokens(request) == eager.tokens(due)
    assert driver.logprobs(request) == eager.logprobs(due)


def test_graphs_equal_step_uploads_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that stay are known on the device: there they get their tokens and their blocks."""
    uploads = []

    def noting(numbers: Any, target: torch.Tensor) -> None:
        uploads.append(len(numbers))
        upload(numbers, target)

    monkeypatch.setattr("engine.runner.graph_inputs.upload", noting)
    driver, _, tapes = captured(checkpoint, max_num_seqs=4, speculation="off")
    steady = driver.submit([3, 4], 40, temperature=1.0, seed=1)
    driver.submit([3, 5], 12, temperature=1.0, seed=2)
    driver.turn(6)
    while driver.runner.capture_when_idle():
        pass
    driver.turn(1)  # behind the inputs of the captures
    uploads.clear()
    replays = tapes.replays
    driver.turn(4)
    assert (tapes.replays - replays, uploads) == (4, [])
    driver.run()
    assert len(uploads) == 1, "only the row that ends changes the others' inputs"
    eager = Driver(checkpoint, attention_backend="torch")
    due = eager.submit([3, 4], 40, temperature=1.0, seed=1)
    eager.run()
    assert driver.tokens(steady) == eager.tokens(due)


def test_graphs_adjusted_and_plain_steps_in_turns_draw_once_each(checkpoint: Path) -> None:
    """Rows with a penalty come and go; the tokens of another row do not change."""
    driver, _, _ = captured(checkpoint, max_num_seqs=4, speculation="off")
    steady = driver.submit([3, 4], 40, temperature=1.0, seed=1)
    for seed in range(3):
        driver.submit([3, seed], 5, temperature=1.0, seed=seed, presence_penalty=1.0)
        driver.turn(10)
    driver.run()
    eager = Driver(checkpoint, attention_backend="torch")
    due = eager.submit([3, 4], 40, temperature=1.0, seed=1)
    eager.run()
    assert driver.tokens(steady) == eager.tokens(due)


def test_graphs_row_with_logprobs_and_penalty_replays_both_graphs(checkpoint: Path) -> None:
    """The host reads and adjusts one row between the two graphs, and no other token changes."""
    driver, _, tapes = captured(checkpoint, max_num_seqs=4, speculation="off")
    plain = [driver.submit([3, n], 9, temperature=1.0, seed=n, top_p=0.9) for n in range(2)]
    driver.run()
    assert tapes.replays == 9
    beside = [driver.submit([3, n], 9, temperature=1.0, seed=n, top_p=0.9) for n in range(2)]
    told = driver.submit([3, 3], 9, temperature=1.0, logprobs=2, frequency_penalty=0.5)
    driver.run()
    assert tapes.replays == 9 + 2 * 9
    assert [driver.tokens(i) for i in beside] == [driver.tokens(i) for i in plain]
    assert len(driver.logprobs(told)) == 9
    eager = Driver(checkpoint, attention_backend="torch")
    due = eager.submit([3, 3], 9, temperature=1.0, logprobs=2, frequency_penalty=0.5)
    eager.run()
    assert (driver.tokens(told), driver.logprobs(told)) == (eager.tokens(due), eager.logprobs(due))


# ---- the tape itself: it must detect errors that a GPU would not tolerate -------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: bool(x.any()),
        lambda x: x.repeat_interleave(x.long()),
    ],
    ids=["item", "tolist", "numpy", "mask", "nonzero", "unique", "bool", "repeat"],
)
def test_tape_host_read_raises(read: Callable[[torch.Tensor], Any]) -> None:
    static = torch.ones(3)
    with pytest.raises(AssertionError, match="on the host"):
        TapeRecorder().record(lambda: static.add_(0 * len([read(static)])))


def test_tape_replay_computes_on_same_memory() -> None:
    given, result = torch.ones(3), torch.zeros(3)
    replay = TapeRecorder().record(lambda: result.copy_((given * 2).view(3, 1).sum(1)))
    given.copy_(torch.tensor([1.0, 5.0, -1.0]))
    replay()
    assert result.tolist() == [2.0, 10.0, -2.0]


def test_tape_replay_poisons_tensors_of_previous_graph() -> None:
    static, kept = torch.ones(3), []
    recorder = TapeRecorder()
    first = recorder.record(lambda: kept.append(static + 1))
    second = recorder.record(lambda: static.copy_(kept[-1] * 2))
    first()
    second()
    assert static.isnan().all()


def test_tape_outside_returns_tensors_made_before_capture() -> None:
    static, result, stray = torch.ones(3), torch.zeros(3), torch.ones(3)
    recorder = TapeRecorder()
    recorder.record(lambda: result.copy_(static + stray))
    assert {id(x) for x in recorder.outside().values()} == {id(x) for x in (static, stray, result)}
