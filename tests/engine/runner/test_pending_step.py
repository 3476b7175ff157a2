"""The host waits for the device at the end of every step, also of one without results."""

from __future__ import annotations

import pytest
import torch

from engine.runner.pending_step import PendingStep
from engine.scheduling.step import Step
from tests.support import fake_cuda


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_step_without_tokens_waits_for_a_gpu(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the host queues all chunks of a long prompt before anything else can run."""
    waited: list[str] = []

    class Event(fake_cuda.Event):
        def record(self) -> None:
            waited.append("recorded")

        def synchronize(self) -> None:
            waited.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pending = PendingStep(Step((), (), ()), 0.0, torch.device(place), None, None, None)
    assert pending.wait() == []
    assert waited == (["recorded", "waited"] if place == "cuda" else [])
