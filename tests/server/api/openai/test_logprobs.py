"""Logprobs of named tokens, and tokens named by their ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving


async def test_logprob_token_ids_reach_the_engine_once_each(served: Served) -> None:
    await served.chat(logprobs=True, top_logprobs=5, logprob_token_ids=[7, 9, 7], max_tokens=1)
    await served.complete(logprobs=0, logprob_token_ids=[7], max_tokens=1)
    await served.chat(logprobs=True, top_logprobs=5, max_tokens=1)
    wanted = [(r.params.logprobs, r.params.logprob_token_ids) for r in served.engine.requests]
    assert wanted == [(2, (7, 9)), (1, (7,)), (5, ())]


async def test_logprob_token_ids_list_the_sampled_token_too(served: Served) -> None:
    fields = {"logprobs": True, "logprob_token_ids": [7], "return_tokens_as_token_ids": True}
    body = (await served.chat(max_tokens=1, **fields)).json()
    [entry] = body["choices"][0]["logprobs"]["content"]
    names = [other["token"] for other in entry["top_logprobs"]]
    assert entry["token"] in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [7]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [999]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids.0"),
    ],
)
async def test_logprob_token_ids_that_cannot_be_returned_are_refused(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    response = await served.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_tokens_are_named_by_their_ids_if_the_request_says_so(served: Served) -> None:
    fields = {"max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    body = (await served.chat(logprobs=True, **fields)).json()
    choice = body["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    body = (await served.complete(logprobs=1, **fields)).json()
    found = body["choices"][0]["logprobs"]
    assert found["tokens"] == names
    assert all(name in top for name, top in zip(names, found["top_logprobs"], strict=True))


@pytest.mark.parametrize(("asked", "named"), [(None, True), (True, True), (False, False)])
async def test_the_flag_names_tokens_by_their_ids_unless_a_request_says_no(
    model: Path, says: Callable[[str], Script], asked: bool | None, named: bool
) -> None:
    fields = {"max_tokens": 2, "return_tokens_as_token_ids": asked}
    async with serving(FakeEngine(says("Hi")), model, return_tokens_as_token_ids=True) as served:
        chat = (await served.chat(logprobs=True, **fields)).json()["choices"][0]
        completion = (await served.complete(logprobs=1, **fields)).json()["choices"][0]
    tokens = [entry["token"] for entry in chat["logprobs"]["content"]]
    for token in (*tokens, *completion["logprobs"]["tokens"]):
        assert token.startswith("token_id:") is named


async def test_bad_keys_of_logit_bias_are_named_with_their_field(served: Served) -> None:
    response = await served.chat(logit_bias={"7": 1, "bad1": 1, "bad2": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logit_bias")
    assert error["message"] == "logit_bias: not token ids below 258: 'bad1', 'bad2'."
    many = await served.chat(logit_bias={f"x{n}": 1 for n in range(9)})
    assert many.json()["error"]["message"].endswith("'x3', 'x4', ….")
