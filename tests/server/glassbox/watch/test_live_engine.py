"""LiveEngine: a lease, snapshots that check the map, frames that end at snapshots, lost readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from engine.errors import EngineDeadError
from engine.protocol.journal import BlockEvent
from engine.protocol.outputs import EngineStats, PrefillChunk, StepOutputs, TokenOutput
from engine.protocol.watch import Blocks, QueueState, RequestState, StepTrace
from server.glassbox.requests.report import Reader
from server.glassbox.requests.step_log import Recorder
from server.glassbox.watch import frames
from server.glassbox.watch.frames import FrameWriter, snapshot_document, totals
from server.glassbox.watch.live_engine import MOST_VIEWERS, LiveEngine, TooManyViewersError
from server.glassbox.watch.viewer import MOST_BEHIND_S, Lost, Viewer
from tests.support.fake_engine import FakeEngine

ALL = Reader(sees_all=True, names={})


class Client:
    """An EngineClient whose engine is played by the test. It answers each `watch` at once."""

    def __init__(self) -> None:
        self.step_listeners: list[Any] = []
        self.state = "ready"
        self.busy = False
        self.listener: Any = None
        self.calls: list[bool] = []
        self.answers = True
        self.step = 0
        self.at = 1000.0
        self.state_of: dict[int, RequestState] = {}  # what a snapshot has
        self.findable: list[int] = []

    def watch(self, listener: Any) -> int:
        self.listener = listener
        self.calls.append(listener is not None)
        if listener is not None and self.answers:
            asyncio.get_running_loop().call_soon(self.answer, len(self.calls))
        return len(self.calls)

    def answer(self, watch_id: int) -> None:
        if self.listener is not None:
            states = list(self.state_of.values())
            held = {b for state in states for table in state.tables for b in table}
            stats = EngineStats(step=self.step, blocks_held=len(held), blocks_total=64)
            self.listener(Blocks(watch_id, states, self.findable, QueueState(), stats))

    def trace(
        self,
        *events: BlockEvent,
        added: tuple[int, ...] = (),
        chunks: tuple[tuple[int, int, int], ...] = (),
        decodes: tuple[int, ...] = (),
        finishes: tuple[int, ...] = (),
        queue: QueueState | None = None,
        accepted: Mapping[int, int] | None = None,  # more tokens than one, by request
    ) -> None:
        """Let the engine compute a step of 10 ms."""
        self.step += 1
        self.at += 0.01
        prefills = [PrefillChunk(*chunk) for chunk in chunks]
        more = accepted or {}
        decoded = [key for key in decodes for _ in range(1 + more.get(key, 0))]
        sampled = [*decoded, *(chunk[0] for chunk in chunks)]
        tokens = [TokenOutput(key, 5, "length" if key in finishes else None) for key in sampled]
        stats = EngineStats(step=self.step, step_seconds=0.01)
        for listen in self.step_listeners:
            listen(StepOutputs(self.at, tokens, [], stats, prefills=prefills))
        if self.listener is None:
            return
        states = [RequestState(key, 999.0, 0, 40) for key in added]
        self.listener(
            StepTrace(
                self.step,
                self.at - 0.01,
                self.at,
                prefills,
                list(decodes),
                [],
                states,
                list(events),
                queue or QueueState(),
                0,
                0,
            )
        )


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def live(client: Client) -> LiveEngine:
    return LiveEngine(client, Recorder(client.step_listeners))  # type: ignore[arg-type]


def take(key: int, *blocks: int, first: int = 0) -> BlockEvent:
    return BlockEvent("take", key, 0, first, blocks)


async def test_without_a_viewer_nothing_listens(client: Client, live: LiveEngine) -> None:
    assert not client.step_listeners
    with live.viewer():
        await live.snapshot()
        assert client.calls == [True]
        assert len(client.step_listeners) == 2  # its own, and the recorder's
    assert not client.step_listeners
    assert client.calls == [True, False]
    assert live.map is None


async def test_snapshot_without_a_viewer_watches_for_a_moment(
    client: Client, live: LiveEngine
) -> None:
    client.state_of = {3: RequestState(3, 999.0, 0, 40, 0, 7, False, ((1, 2),))}
    document = snapshot_document(live, await live.snapshot(), ALL)
    assert client.calls == [True, False]
    [request] = document["requests"]
    assert (request["id"], request["state"], request["out"]) == (3, "running", 7)
    assert request["tables"] == [[1, 2]]


async def test_snapshots_at_the_same_time_are_one_question(
    client: Client, live: LiveEngine
) -> None:
    one, two = await asyncio.gather(live.snapshot(), live.snapshot())
    assert one is two
    assert client.calls == [True, False]


async def test_answer_to_an_earlier_lease_is_ignored(client: Client, live: LiveEngine) -> None:
    client.answers = False
    waiting = asyncio.create_task(live.snapshot())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert client.calls == [True, False]
    again = asyncio.create_task(live.snapshot())
    await asyncio.sleep(0.15)
    client.answer(1)
    assert live.map is None
    client.answer(3)
    await again


async def test_snapshot_of_a_dead_engine_fails(client: Client, live: LiveEngine) -> None:
    client.answers = False
    waiting = [asyncio.create_task(live.snapshot()) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.sleep(0)
    client.listener(EngineDeadError("gone"))
    for one in waiting[1:]:
        with pytest.raises(EngineDeadError):
            await one
    assert not client.step_listeners


async def test_step_that_cannot_be_shown_is_lost_and_the_map_begins_again(
    client: Client, live: LiveEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with live.viewer() as viewer:
        viewer.begin((await live.snapshot()).number)
        client.trace(take(1, 10, first=3), added=(1,))  # a gap
        assert "cannot be shown" in caplog.text
        assert isinstance(viewer.take()[0], Lost)
        client.state_of = {1: RequestState(1, 999.0, 0, 40, tables=((0, 0, 0, 10),))}
        await asyncio.sleep(0.01)
        client.trace(take(1, 11, first=4))
        [steps] = viewer.take()
        assert not isinstance(steps, Lost)
        [row] = FrameWriter(live).frame(steps, ALL)["kv"]
        assert row == ["take", 1, 0, 4, [11]]


async def test_fifth_viewer_is_refused(live: LiveEngine) -> None:
    with live.viewer(), live.viewer(), live.viewer(), live.viewer():
        assert live.num_viewers == MOST_VIEWERS
        with pytest.raises(TooManyViewersError), live.viewer():
            pass
    with live.viewer():
        assert live.num_viewers == 1


async def test_frame_has_the_tokens_of_accepted_drafts(client: Client, live: LiveEngine) -> None:
    """One step decodes request 1 and gives it three tokens; the next decode gives one, or none."""
    with live.viewer() as viewer:
        await live.snapshot()
        client.trace(take(1, 10), take(2, 11), added=(1, 2), chunks=((1, 0, 40), (2, 0, 40)))
        writer = FrameWriter(live)
        [step] = viewer.take()
        assert isinstance(step, list)
        writer.frame(step, ALL)
        client.trace(decodes=(1, 2), accepted={1: 2})
        client.trace(decodes=(1, 2))
        [both] = viewer.take()
        assert isinstance(both, list)
        [row] = writer.frame(both, ALL)["requests"]  # 2 has one token a decode
        assert (row[0], row[frames.FIELDS.index("out")]) == (1, 5)
        client.trace(decodes=(1, 2), accepted={2: -1})
        [dropped] = viewer.take()
        assert isinstance(dropped, list)
        [row] = writer.frame(dropped, ALL)["requests"]
        assert (row[0], row[frames.FIELDS.index("out")]) == (2, 3)


async def test_frame_merges_steps_and_sends_decodes_as_differences(
    client: Client, live: LiveEngine
) -> None:
    with live.viewer() as viewer:
        snapshot = await live.snapshot()
        viewer.begin(snapshot.number)
        client.trace(take(1, 10), added=(1,), chunks=((1, 0, 40),))
        client.trace(
            take(2, 11), BlockEvent("find", 10), added=(2,), chunks=((2, 0, 40),), decodes=(1,)
        )
        client.trace(decodes=(1, 2))
        client.trace(BlockEvent("end", 1), decodes=(1, 2), finishes=(1,))
        writer = FrameWriter(live)
        [steps] = viewer.take()
        assert not isinstance(steps, Lost)
        frame = writer.frame(steps, ALL)
        assert [step[3] for step in frame["steps"]] == [[[1, 0, 40]], [[2, 0, 40]], [], []]
        assert [step[4:6] for step in frame["steps"]] == [[[], []], [[1], []], [[2], []], [[], []]]
        assert [step[2] for step in frame["steps"]] == [10_000] * 4
        rows = {row[0]: row[:5] for row in frame["requests"]}
        assert rows == {1: [1, "length", 40, 0, 4], 2: [2, "running", 40, 0, 3]}
        assert frame["kv"] == [
            ["take", 1, 0, 0, [10]], ["take", 2, 0, 0, [11]], ["find", [10]], ["end", 1],
        ]  # fmt: skip
        assert frame["stats"]["generated"] == 7
        assert viewer.take() == []
        client.trace(decodes=(2,))
        [steps] = viewer.take()
        assert not isinstance(steps, Lost)
        assert writer.frame(steps, ALL)["steps"][0][4:6] == [[], [1]]


async def test_frame_ends_at_a_snapshot(client: Client, live: LiveEngine) -> None:
    with live.viewer() as viewer:
        viewer.begin((await live.snapshot()).number)
        client.trace()
        client.trace()
        number = (await live.snapshot()).number
        client.trace()
        taken = viewer.take()
        ends = [steps[-1].number for steps in taken if not isinstance(steps, Lost)]
        assert ends == [number, number + 1]


async def test_reader_without_rights_gets_own_requests_and_totals(
    client: Client, live: LiveEngine
) -> None:
    reader = Reader(sees_all=False, names={2: "mine"})
    with live.viewer() as viewer:
        viewer.begin((await live.snapshot()).number)
        client.trace(
            take(1, 10), take(2, 11, 12), BlockEvent("find", 10), BlockEvent("find", 11),
            added=(1, 2, 3, 4), chunks=((1, 0, 40), (2, 0, 30)),
            queue=QueueState((3, 4), "blocks", 9, 4),
        )  # fmt: skip
        client.trace(BlockEvent("preempt", 1), decodes=(1, 2))
        [steps] = viewer.take()
        assert not isinstance(steps, Lost)
        frame = FrameWriter(live).frame(steps, reader)
        assert [step[3:] for step in frame["steps"]] == [
            [[[2, 0, 30]], [], [], [], [40, 0]],
            [[], [2], [], [], [0, 1]],
        ]
        assert [row[0] for row in frame["requests"]] == [2]
        assert frame["kv"] == [["take", 2, 0, 0, [11, 12]], ["find", [11]]]
        assert frame["queue"]["requests"] == []
        assert frame["queue"]["first"] is None
        assert [row["id"] for row in totals(live, 0.0, reader)["requests"]] == [2]
    client.state_of = {
        1: RequestState(1, 0.0, 0, 40, tables=((10,),)),
        2: RequestState(2, 0.0, 0, 40, tables=((11, 12),)),
    }
    client.findable = [10, 11, 20]
    document = snapshot_document(live, await live.snapshot(), reader)
    assert [request["id"] for request in document["requests"]] == [2]
    assert document["findable"] == [11]


async def test_wrong_map_is_logged_and_readers_are_lost(
    client: Client, live: LiveEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with live.viewer() as viewer:
        viewer.begin((await live.snapshot()).number)
        client.trace(take(1, 10), added=(1,))
        client.state_of = {1: RequestState(1, 999.0, 0, 40, tables=((11,),))}
        with caplog.at_level(logging.ERROR):
            await live.snapshot()
        assert "differ" in caplog.text
        assert isinstance(viewer.take()[0], Lost)


async def test_reader_far_behind_is_lost_and_keeps_little(client: Client, live: LiveEngine) -> None:
    clock = mock.Mock(**{"monotonic.return_value": 0.0})
    with mock.patch("server.glassbox.watch.live_engine.time", clock), live.viewer() as viewer:
        await live.snapshot()
        for _ in range(100):
            clock.monotonic.return_value += MOST_BEHIND_S / 10
            client.trace()
            assert len(viewer._steps) <= 12
        taken = viewer.take()
        assert isinstance(taken[0], Lost)
        assert len(taken) <= 2


def test_lost_frame_makes_the_next_one_complete() -> None:
    writer = FrameWriter(mock.Mock(epoch=0.0))
    writer._decoding = {1, 2}
    assert writer.lost(1.0) == {"t": 1_000_000, "lost": True}
    assert not writer._decoding


def test_viewer_drops_what_a_snapshot_has() -> None:
    viewer = Viewer()
    steps = [mock.Mock(number=number, received=0.0) for number in (1, 2, 3)]
    for step in steps:
        viewer.add(step)
    viewer.cut(2)
    viewer.begin(2)
    assert viewer.take() == [[steps[2]]]


def test_fields_of_a_row_are_named_once() -> None:
    assert len(set(frames.FIELDS)) == len(frames.FIELDS)


def test_viewers_of_one_key_keep_neither_admins_nor_others_out() -> None:
    engine = FakeEngine(lambda request: [])
    live = LiveEngine(engine, Recorder(engine.step_listeners))
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(live.viewer("plain", is_admin=False))
        with pytest.raises(TooManyViewersError):
            live.viewer("plain", is_admin=False).__enter__()
        stack.enter_context(live.viewer("other", is_admin=False))
        stack.enter_context(live.viewer("admin", is_admin=True))
    assert live.num_viewers == 0
    with live.viewer("plain", is_admin=False):
        assert live.num_viewers == 1
