"""GenerationRecorder: which requests it records, and that it gives its lease back."""

from __future__ import annotations

import pytest

from engine.errors import EngineOverloadedError
from tests.support.rig import Served

UI = {"x-penstock-ui": "1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_lease_is_given_back_after_a_refusal(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    recorder = served.app.state.glassbox.recorder
    listeners = list(served.engine.step_listeners)
    held = []

    def refuse(requests: object) -> None:
        held.append(recorder.is_leased)
        raise EngineOverloadedError("The queue is full.", retry_after=7)

    monkeypatch.setattr(served.engine, "submit", refuse)
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    response = await served.http.post("/v1/chat/completions", json=body, headers=UI)
    assert response.status_code == 503
    assert held == [True]
    assert not recorder.is_leased
    assert served.engine.step_listeners == listeners
    assert recorder.open_requests == recorder.requests == []


async def test_request_without_the_header_is_recorded_while_a_lease_is_held(
    served: Served,
) -> None:
    recorder = served.app.state.glassbox.recorder
    with recorder.lease():
        await served.chat(max_tokens=2)
    await served.chat(max_tokens=2)
    assert len(recorder.requests) == 1
    assert not recorder.is_leased
