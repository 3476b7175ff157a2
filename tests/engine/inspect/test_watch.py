"""Watching: no cost without a viewer, the same tokens, and events that rebuild the tables."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest

from engine.inspect.watch import EngineWatch
from engine.protocol.generate import Abort
from engine.protocol.journal import BlockEvent
from engine.protocol.lens import LensRequest
from engine.protocol.outputs import StepOutputs
from engine.protocol.watch import Blocks, StepTrace, Watch
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_builder import StepBuilder
from server.glassbox.watch.block_map import BlockMap
from tests.engine.scheduling import simulation as simulations
from tests.engine.scheduling.simulation import Simulation, random_traffic
from tests.support.driver import EAGER, Driver, each
from tests.support.thorough import examples

modes = pytest.mark.parametrize("mode", each(EAGER))
Tables = dict[tuple[int, int], list[int]]


class Rebuilt:
    """The block tables and the prefix cache as the events say, independent of BlockMap."""

    def __init__(self) -> None:
        self.tables: Tables = {}  # by request and KV group
        self.findable: set[int] = set()
        self.kinds: set[str] = set()

    def apply(self, event: BlockEvent) -> None:
        self.kinds.add(event.kind)
        table = self.tables.get((event.id, event.group), [])
        match event.kind:
            case "take":
                assert len(table) == event.first
                self.tables[event.id, event.group] = table + list(event.blocks)
            case "pass":
                for offset, block in enumerate(event.blocks):
                    assert table[event.first + offset] == block
                    table[event.first + offset] = 0
            case "preempt" | "end":
                self.tables = {key: t for key, t in self.tables.items() if key[0] != event.id}
            case "find":
                assert event.id not in self.findable
                self.findable.add(event.id)
            case "forget":
                self.findable.remove(event.id)

    def check(self, scheduler: Scheduler) -> None:
        found = {
            (sequence.id, group): table
            for sequence in scheduler.running
            for group, table in enumerate(sequence.tables)
            if table
        }
        assert self.tables == found
        pool = scheduler.pool
        assert self.findable == set(pool.findable)
        held = {block for table in self.tables.values() for block in table if block}
        assert len(held) == pool.num_held
        assert len(self.findable - held) == pool.num_cached


def filled(tables: list[list[int]]) -> dict[int, list[int]]:
    return {group: table for group, table in enumerate(tables) if table}


@pytest.fixture
def rebuilding(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Watch every Simulation, and compare what its events rebuild with the tables at each check.

    Returns the kinds of events that occurred.
    """
    kinds: set[str] = set()
    watched: WeakKeyDictionary[Simulation, tuple[EngineWatch, Rebuilt, BlockMap]]
    watched = WeakKeyDictionary()

    def check(self: Simulation) -> None:
        original(self)
        scheduler = self.scheduler
        if self not in watched:  # its first check comes before it holds a block
            watch = EngineWatch(scheduler)
            watched[self] = watch, Rebuilt(), BlockMap(watch.blocks(0, scheduler.stats()))
        watch, rebuilt, block_map = watched[self]
        for key in scheduler.sequences.keys() - block_map.requests.keys():
            watch.add(self.device.requests[key][0])
        trace = watch.trace(scheduler.stats(), None, 0.0, 0.0)
        for event in trace.events:
            rebuilt.apply(event)
        block_map.apply(trace, [])
        rebuilt.check(scheduler)
        assert block_map.findable == rebuilt.findable
        tables = {key: request.tables for key, request in block_map.requests.items()}
        assert tables == {s.id: filled(s.tables) for s in scheduler.sequences.values()}
        kinds.update(rebuilt.kinds)

    original = Simulation.check
    monkeypatch.setattr(simulations.Simulation, "check", check)
    return kinds


def test_events_rebuild_the_tables_after_random_traffic(rebuilding: set[str]) -> None:
    """With aborts, preemptions, windows, several groups, sources and failed requests."""
    for seed in range(examples(60)):
        random_traffic(seed)
    assert rebuilding == {"take", "pass", "preempt", "end", "find", "forget"}


def traffic(driver: Driver, rng: random.Random) -> list[int]:
    """Submit requests with common beginnings in a cache too small for all; abort some."""
    stem = [rng.randrange(500) for _ in range(60)]
    ids = []
    for _ in range(24):
        prompt = stem[: rng.randint(1, 60)] + [rng.randrange(500) for _ in range(rng.randint(1, 9))]
        ids.append(
            driver.submit(prompt, rng.randint(1, 40), temperature=1.0, seed=rng.randrange(99))
        )
        if rng.random() < 0.2:
            driver.abort(rng.choice(ids))
        driver.turn(rng.randint(0, 3))
    return ids


SMALL: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 12, "max_num_seqs": 6}


@modes
def test_unwatched_engine_has_no_journal_and_sends_no_trace(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, **mode, **SMALL)
    traffic(driver, random.Random(1))
    assert driver.inspectors.watch is None
    driver.run()
    assert driver.core.scheduler.pool.journal is None
    assert {type(message) for message in driver.sent} == {StepOutputs}


@modes
def test_watched_engine_sends_the_same_tokens_and_messages(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    """But for the traces; times differ from run to run, so they are masked."""

    def run(*, watched: bool) -> list[bytes]:
        driver = Driver(checkpoint, **mode, **SMALL)
        if watched:
            driver.core.handle(Watch(10**6, on=True))
        driver.submit(list(range(40)), 20, logprobs=3, temperature=0.7, seed=5)
        for seed in range(12):
            prompt = list(range(30 + seed))
            driver.submit(prompt, 20, logprobs=3, temperature=0.7, seed=seed)
        driver.abort(4)
        driver.run()
        sent = [message for message in driver.sent if isinstance(message, StepOutputs)]
        assert len(driver.sent) > len(sent) if watched else driver.sent == sent
        assert driver.stats.preemptions > 0
        return [masked(message) for message in sent]

    assert run(watched=True) == run(watched=False)


def masked(outputs: StepOutputs) -> bytes:
    """The bytes of a message with its times set to 0."""
    replace = msgspec.structs.replace
    stats = replace(outputs.stats, step_seconds=0.0, gauges={})
    admitted = [replace(admission, at=0.0) for admission in outputs.admitted]
    return msgspec.msgpack.encode(replace(outputs, at=0.0, stats=stats, admitted=admitted))


@modes
def test_block_map_equals_every_snapshot(checkpoint: Path, mode: dict[str, Any]) -> None:
    driver = Driver(checkpoint, **mode, **SMALL)
    rng = random.Random(7)
    traffic(driver, rng)  # requests run before anyone looks
    begun = len(driver.sent)
    driver.inbox.append(Watch(10**6, on=True))
    driver.turn()
    ids = traffic(driver, rng)
    for number in range(1, 30):
        driver.inbox.append(Watch(10**6 + number, on=True))
        driver.turn(rng.randint(1, 4))
    driver.run()
    check_messages(driver, begun)
    driver.inbox.append(Watch(2 * 10**6, on=False))
    driver.turn()
    assert driver.core.scheduler.pool.journal is None
    assert all(driver.finish(i) for i in ids if i not in aborted(driver))


def aborted(driver: Driver) -> set[int]:
    return {i for i in range(1, driver._ids + 1) if driver.finish(i) is None}


def check_messages(driver: Driver, begun: int) -> None:
    """Rebuild the map from the messages behind `begun`; compare it with each snapshot."""
    block_map: BlockMap | None = None
    outputs: list[StepOutputs] = []
    snapshots = 0
    for message in driver.sent[begun:]:
        match message:
            case StepOutputs() if block_map is not None:
                outputs.append(message)
            case StepTrace():
                assert block_map is not None
                block_map.apply(message, outputs)
                for output in outputs:  # counts that /metrics shows at this moment
                    assert output.stats.blocks_held == message.blocks_held
                    assert output.stats.blocks_cached == message.blocks_cached
                outputs = []
            case Blocks():
                assert block_map is None or block_map.equals(BlockMap(message))
                block_map = BlockMap(message)
                snapshots += 1
    assert snapshots == 30


def test_trace_names_what_a_step_computes(checkpoint: Path) -> None:
    driver = Driver(checkpoint, max_num_batched_tokens=16, block_size=16)
    driver.core.handle(Watch(99, on=True))
    first = driver.submit(list(range(40)), 4)
    second = driver.submit([7, 8], 4)
    driver.run()
    traces = [m for m in driver.sent if isinstance(m, StepTrace) and m.launched]
    assert [t.launched <= t.at for t in traces] == [True] * len(traces)
    assert all(a.at <= b.at for a, b in pairwise(traces))
    chunks = [(c.id, c.start, c.count) for t in traces for c in t.chunks]
    assert sum(count for key, _, count in chunks if key == first) == 40
    assert (second, 0, 2) in chunks
    decodes = [key for trace in traces for key in trace.decodes]
    assert decodes.count(first) == decodes.count(second) == 3
    assert [state.id for trace in traces for state in trace.added] == [first, second]


def test_trace_has_the_pieces_of_lenses_between_steps(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.core.handle(Watch(99, on=True))
    driver.submit([7, 8], 8)
    driver.turn()
    driver.inbox.append(LensRequest(900, [1, 2, 3], positions=(0, 1)))
    driver.run()
    while driver.inspectors.lenses:
        driver.turn()
    traces = [m for m in driver.sent if isinstance(m, StepTrace)]
    pieces = [piece for trace in traces for piece in trace.lenses]
    steps = [(trace.launched, trace.at) for trace in traces if trace.launched]
    assert len(pieces) >= 3
    assert all(begin <= end for begin, end in pieces)
    in_order = sorted([*pieces, *steps])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(in_order)), "none overlap"


def waits(driver: Driver) -> list[tuple[str, int, int, int]]:
    """(reason, needed, available, sharing) of the queue after each step in which some wait."""
    traces = [m for m in driver.sent if isinstance(m, StepTrace) and m.queue.ids]
    return [(t.queue.reason, t.queue.needed, t.queue.available, t.queue.sharing) for t in traces]


def test_queue_waits_for_a_row(checkpoint: Path) -> None:
    driver = Driver(checkpoint, max_num_seqs=1)
    driver.core.handle(Watch(99, on=True))
    driver.submit([1, 2], 8)
    driver.submit([3, 4], 8)
    driver.turn(3)
    assert {reason for reason, *_ in waits(driver)} == {"rows"}


def test_queue_waits_for_blocks_and_says_how_many(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16, num_gpu_blocks_override=5)
    driver.core.handle(Watch(99, on=True))
    driver.submit([1] * 40, 5)
    driver.submit([2] * 40, 5)
    driver.turn(2)
    # 3 blocks for 40 tokens, and one stays free; the first request holds 3 of 5.
    assert waits(driver)[-1][:3] == ("blocks", 4, 2)


def test_queue_waits_for_the_token_budget(checkpoint: Path) -> None:
    driver = Driver(checkpoint, max_num_batched_tokens=16)
    driver.core.handle(Watch(99, on=True))
    driver.submit([1] * 16, 5)
    driver.submit([2] * 16, 5)
    driver.turn()
    assert waits(driver)[-1][0] == "budget"


def test_queue_waits_to_reuse_the_block_that_a_long_prompt_computes(checkpoint: Path) -> None:
    driver = Driver(checkpoint, max_num_batched_tokens=16, block_size=16)
    first = driver.submit([1] * 64, 5)
    driver.turn()
    driver.submit([1] * 64, 5)
    driver.core.handle(driver.inbox.pop())
    scheduler = driver.core.scheduler
    builder = StepBuilder(100, 100)  # a step with room, in which the first prompt is cut
    builder.cut_prompts.append(scheduler.sequences[first])
    scheduler._admit_waiting(builder)
    assert (scheduler.waiting.reason, scheduler.waiting.sharing) == ("prefix", first)


def test_watch_of_an_idle_engine_answers_at_once(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.inbox.append(Watch(5, on=True))
    driver.turn()
    [blocks] = [m for m in driver.sent if isinstance(m, Blocks)]
    assert (blocks.id, blocks.requests, blocks.findable) == (5, [], [])
    driver.submit([1, 2, 3], 30)
    driver.turn(2)
    driver.inbox.append(Abort([1]))
    driver.turn(2)
    ends = [e for m in driver.sent if isinstance(m, StepTrace) for e in m.events if e.kind == "end"]
    assert [event.id for event in ends] == [1]
