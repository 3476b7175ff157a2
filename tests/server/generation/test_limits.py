"""Limits of a request: `min_tokens` beyond the context, and errors that name their field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

# The context has 512 tokens. A prompt of 500 letters with its BOS token leaves 11.
LONG = "a" * 500


def told(served: Served, count: int) -> list[tuple[int, int]]:
    """Return min_tokens and max_tokens of the last requests at the engine."""
    params = [request.params for request in served.engine.requests[-count:]]
    return [(each.min_tokens, each.max_tokens) for each in params]


@pytest.mark.parametrize(
    ("fields", "adjusted", "params"),
    [
        ({"prompt": LONG, "min_tokens": 11, "max_tokens": 11}, None, [(11, 11)]),
        ({"prompt": LONG, "min_tokens": 12, "max_tokens": 12}, (11, 11), [(11, 11)]),
        ({"prompt": LONG, "min_tokens": 500, "max_tokens": 32_000}, (11, 11), [(11, 11)]),
        ({"prompt": LONG, "min_tokens": 12}, (None, 11), [(11, 11)]),
        ({"prompt": [LONG, "a"], "min_tokens": 12}, (None, 11), [(11, 11), (12, 16)]),
        ({"prompt": "a", "min_tokens": 16}, None, [(16, 16)]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_min_tokens_beyond_the_context_is_lowered_and_named(
    served: Served, fields: Any, adjusted: Any, params: Any, stream: bool
) -> None:
    response = await served.complete(stream=stream, **fields)
    assert response.status_code == 200, response.text
    assert told(served, len(params)) == params
    expected = None
    if adjusted is not None:
        pairs = zip(("max_tokens", "min_tokens"), adjusted, strict=True)
        expected = ", ".join(f"{name}={value}" for name, value in pairs if value is not None)
    assert response.headers.get("x-adjusted-params") == expected


async def test_min_tokens_of_a_chat_is_lowered_to_what_the_context_leaves(served: Served) -> None:
    response = await served.chat(min_tokens=100_000)
    assert response.status_code == 200, response.text
    [(least, most)] = told(served, 1)
    assert least == most < 512
    assert response.headers["x-adjusted-params"] == f"min_tokens={least}"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "max_tokens": 2, "min_tokens": 3},
        {"prompt": "a", "min_tokens": 17},  # more than the default of max_tokens
        {"prompt": LONG, "max_tokens": 100, "min_tokens": 101},
        {"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1},
    ],
)
async def test_min_tokens_above_max_tokens_is_refused(served: Served, fields: Any) -> None:
    response = await served.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "min_tokens")
    assert "max_tokens" in error["message"]


async def test_strict_max_tokens_refuses_min_tokens_that_do_not_fit(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("x")), model, strict_max_tokens=True) as served:
        response = await served.complete(prompt=LONG, min_tokens=12)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logit_bias": {"abc": 1}}, "logit_bias", "not token ids below 258: 'abc'"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "'258'"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        ({"logit_bias": {"a b": "x"}}, "logit_bias", "number"),
        ({"stop_token_ids": [258]}, "stop_token_ids", "258"),
        ({"allowed_token_ids": [1, 999]}, "allowed_token_ids", "999"),
        ({"bad_words": [f"{number:060}" for number in range(60)]}, "bad_words", "2048"),
        ({"stop": ["a", ["b"]]}, "stop.1", "string"),
        ({"prompt": [[5, 999]]}, "prompt", "999"),
        ({"logprobs": -1}, "logprobs", "-1, the whole vocabulary, is not supported: at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt": [[1, "a"]]}, "prompt.0.1", "integer"),
        ({"n": 128, "prompt": ["a"] * 17}, "prompt", "2048"),
        ({"suffix": "b"}, "suffix", "fill-in"),
        ({"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens", "integer"),
        ({"metadata": {}, "response_format": {"type": "x"}}, "response_format", "type"),
    ],
)
async def test_error_names_its_field_in_param_and_message(
    served: Served, fields: Any, param: str, words: str
) -> None:
    response = await served.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert param in error["message"]
    assert words in error["message"]
