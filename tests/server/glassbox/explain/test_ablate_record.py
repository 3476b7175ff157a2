"""The records of --record: no ablated answer is among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.glassbox.explain.test_ablate import post
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving


async def test_ablated_request_is_not_recorded(model: Path, says: Any, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    async with serving(FakeEngine(says("Hello")), model, record=str(record)) as served:
        await post(served, {"off": {"layers": [0]}})
        assert not record.read_text()
        await post(served, {"off": {}})
    assert len(record.read_text().splitlines()) == 1
