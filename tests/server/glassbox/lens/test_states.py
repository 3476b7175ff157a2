"""/ui/api/lens of a model with recurrent layers, around a FakeEngine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from engine.protocol.lens import (
    AttentionWeights,
    HeadSummaries,
    LensRequest,
    LensResult,
    StateTrace,
)
from server.glassbox.lens import captures as desk
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

UI = {"x-penstock-ui": "1"}
NORMS, STRENGTHS, DECAYS = (np.arange(6, dtype="<f4").reshape(2, 3) / scale for scale in (1, 8, 16))
TRACES = [
    StateTrace(0, 2, NORMS.tobytes(), STRENGTHS.tobytes(), DECAYS.tobytes()),
    StateTrace(1, 1, NORMS[:1].tobytes()),
    StateTrace(3, 2, b""),
]
WEIGHTS = np.array([[1, 0.25, 0.75, 0.5, 0.25, 0.25]], "<f4")  # the lower triangle of a head


def scripted(request: LensRequest) -> LensResult:
    """A model whose layer 2 attends."""
    numbers = (0.5,)
    summary = HeadSummaries(1, 1, b"\1", numbers, numbers, numbers)
    attention = AttentionWeights("decoder", 2, 1, 3, 3, WEIGHTS.tobytes(), summary=summary)
    return LensResult(
        request.id,
        attention=[attention] if request.attention else [],
        states=TRACES if request.states else [],
    )


@pytest.fixture
async def recurrent(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Served]:
    monkeypatch.setattr(desk, "INTERVAL", 0.0)
    info = msgspec.structs.replace(INFO, state_bytes=64)
    async with serving(FakeEngine(says("Hello"), lens=scripted, info=info), model) as running:
        yield running


async def post(served: Served, path: str = "", **body: Any) -> httpx2.Response:
    return await served.http.post(f"/ui/api/lens{path}", json={"ids": [1, 2, 3]} | body, headers=UI)


async def test_report_has_the_states_by_layer_and_head(recurrent: Served) -> None:
    answer = await post(recurrent, want=["states"])
    (sent,) = recurrent.engine.looks
    assert (sent.states, sent.attention, sent.predictions) == (True, False, False)
    assert answer.json()["states"] == [
        {
            "layer": 0,
            "heads": 2,
            "norms": NORMS.tolist(),
            "strengths": STRENGTHS.tolist(),
            "decays": DECAYS.tolist(),
        },
        {"layer": 1, "heads": 1, "norms": NORMS[:1].tolist(), "strengths": None, "decays": None},
        {"layer": 3, "heads": 2, "norms": None, "strengths": None, "decays": None},
    ]


async def test_states_are_not_computed_unless_wanted(recurrent: Served) -> None:
    answer = await post(recurrent, want=["predictions"])
    assert not recurrent.engine.looks[-1].states
    assert "states" not in answer.json()


async def test_states_of_a_model_without_recurrent_layers_are_refused(
    model: Path, says: Any
) -> None:
    found = LensResult(0)
    engine = FakeEngine(
        says("Hello"), lens=lambda request: msgspec.structs.replace(found, id=request.id)
    )
    async with serving(engine, model) as served:
        refused = await post(served, want=["states"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "want")
        assert "states" not in (await post(served)).json()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"layers": [4]}, "no layer 4. Choose from 0, 1, 2, 3."),
        ({"layers": [0], "want": ["thumbs"]}, "no layer 0. Choose from 2."),
        ({"layers": [2], "want": ["states"]}, "no layer 2. Choose from 0, 1, 3."),
    ],
)
async def test_layer_that_the_answer_cannot_have_is_refused(
    recurrent: Served, body: dict[str, Any], problem: str
) -> None:
    refused = await post(recurrent, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "layers")
    assert problem in refused.json()["error"]["message"]


async def test_attention_of_a_hybrid_has_the_numbers_of_the_model(recurrent: Served) -> None:
    report = (await post(recurrent, want=["states"])).json()
    assert report["capture"] is None
    report = (await post(recurrent, layers=[2, 3])).json()
    decoder = report["attention"]["decoder"]
    assert (decoder["numbers"], decoder["kept"]) == ([2], [2])
    capture = report["capture"]
    whole = await recurrent.http.get(f"/ui/api/lens/{capture}/2/0?row=2", headers=UI)
    assert whole.json()["weights"] == WEIGHTS[0, 3:].tolist()
    refused = await recurrent.http.get(f"/ui/api/lens/{capture}/0/0", headers=UI)
    assert refused.status_code == 400
    assert "Layer 0 has no attention. Choose from 2." in refused.json()["error"]["message"]
    refused = await post(recurrent, "/attention", layers=[0])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "layers")
