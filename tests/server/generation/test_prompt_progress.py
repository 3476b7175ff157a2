"""ProgressReader: events of the steps that compute a prompt."""

from __future__ import annotations

from engine.protocol.outputs import PrefillChunk
from server.generation.events import PromptProgress
from server.generation.prompt_progress import ProgressReader

Chunks = list[tuple[float, float, PrefillChunk]]


def chunks(*spans: tuple[int, int]) -> Chunks:
    """Return prefills of (start, count), each of one second."""
    return [(10.0 + n, 11.0 + n, PrefillChunk(1, *span)) for n, span in enumerate(spans)]


def test_the_first_event_says_what_was_cached() -> None:
    reader = ProgressReader(100)
    assert reader.read([], 10.0) == []
    found = reader.read(chunks((16, 64)), 10.0)
    assert found == [PromptProgress(100, 16, 16, 0.0), PromptProgress(100, 16, 80, 1000.0)]


def test_each_prefill_is_reported_once() -> None:
    reader = ProgressReader(100)
    every = chunks((0, 64), (64, 36))
    reader.read(every[:1], 10.0)
    assert reader.read(every, 10.0) == [PromptProgress(100, 0, 100, 2000.0)]
    assert reader.read(every, 10.0) == []


def test_a_prefill_that_begins_again_does_not_go_back() -> None:
    reader = ProgressReader(100)
    found = reader.read(chunks((0, 64), (0, 64), (64, 40)), 10.0)
    assert [event.processed for event in found] == [0, 64, 100]
