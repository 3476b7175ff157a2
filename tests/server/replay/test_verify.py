"""A replay on another server is refused, and the settings that differ are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from server.replay.client import ReplayClient
from server.replay.recorded import RecordedAnswer
from server.replay.verify import CannotVerify, Plan, Report, Verification, different_settings
from tests.support.fake_engine import INFO
from tests.support.recorded import written_record
from tests.support.rig import Served


@pytest.fixture
async def answers(recording: Served, record_file: Path) -> dict[int, RecordedAnswer]:
    """One recorded answer of `recording`."""
    await recording.complete()
    return await written_record(record_file, 1)


async def verified(served: Served, answers: dict[int, RecordedAnswer]) -> Report:
    return await Verification(ReplayClient(served.http), answers, Plan(0, 0, 1)).run()


async def test_verification_on_the_same_server_is_equal(
    recording: Served, answers: dict[int, RecordedAnswer]
) -> None:
    before = len(recording.engine.requests)
    report = await verified(recording, answers)
    assert (report.equal, report.refusals) == (1, {})
    assert len(recording.engine.requests) == before + 1, "only the replay is sent"


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"quantization": "int4"}, "quantization: none, now int4"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: auto, now int8"),
        ({"weights": "ab"}, f"weights: {INFO.weights}, now ab"),
        (
            {"dtype": "bfloat16", "batch_variance": "amx"},
            "dtype: float32, now bfloat16; batch_invariant: on, now off (amx)",
        ),
    ],
)
@pytest.mark.variants(2)
async def test_verification_on_another_server_names_what_differs(
    recording: Served, answers: dict[int, RecordedAnswer], facts: dict[str, Any], named: str
) -> None:
    recording.engine.info = replace(INFO, **facts)
    with pytest.raises(CannotVerify) as refused:
        await verified(recording, answers)
    assert f"({named})" in str(refused.value)


async def test_verification_of_a_record_without_settings_names_its_model_and_version(
    recording: Served, answers: dict[int, RecordedAnswer]
) -> None:
    old = replace(answers[1], fingerprint="fp_old", settings={}, version="0.0.9")
    with pytest.raises(CannotVerify, match=r"fp_old.*names no settings; tiny, 0\.0\.9"):
        await verified(recording, {1: old})


def test_different_settings_has_those_of_one_side_only() -> None:
    recorded, served = {"a": "1", "adapter": "fr"}, {"a": "1", "b": "2"}
    assert different_settings(recorded, served) == ["b: none, now 2", "adapter: fr, now none"]
