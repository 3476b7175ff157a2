"""The engine ends an answer at each end token that a file of the checkpoint names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import EOS, encode, says, write_model
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, serving

__all__ = ["encode", "says"]


@pytest.fixture
async def served(tmp_path: Path, says: Any) -> AsyncIterator[Served]:
    """A server whose files name three ends: 10, 11, and the tokenizer's EOS."""
    folder = write_model(tmp_path / "tiny")
    for name, ends in (("generation_config.json", 10), ("config.json", [11])):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": ends}))
    async with serving(FakeEngine(says("Hi")), folder) as running:
        yield running


async def test_chats_and_completions_end_at_every_named_token(served: Served) -> None:
    assert (await served.chat()).status_code == 200
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    for more in ({}, {"min_tokens": 2}, {"ignore_eos": True}):
        answer = await served.http.post("/v1/completions", json={**body, **more})
        assert answer.status_code == 200
    params = [request.params for request in served.engine.requests]
    assert [p.stop_token_ids for p in params] == [*[(10, 11, EOS)] * 3, ()]
    assert params[2].min_tokens == 2  # the sampler masks all stop_token_ids until then


async def test_grammar_ends_with_every_named_token(served: Served) -> None:
    await served.chat(response_format={"type": "json_object"})
    grammar = served.engine.requests[0].params.grammar
    assert grammar is not None
    assert set(grammar.end_token_ids) == {10, 11, EOS}
