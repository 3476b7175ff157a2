"""POST /ui/api/prompt against real requests: its cached tokens are those of the next request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import web
from tests.support.serve import Server, serving

KEYS = ("alpha", "beta")
WORDS = ["river", "runs", "past", "a mill", "where", "three", "friends", "count", "boats", "and 😀"]
# Few blocks, so that traffic evicts some; large ones, so that prompts share parts of them.
SMALL = ("--num-gpu-blocks-override", "24", "--max-model-len", "512")


@pytest.fixture(
    scope="module", params=["demo", pytest.param("demo-translate", marks=pytest.mark.slow)]
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    keys = {"PENSTOCK_API_KEY": ",".join(KEYS)}
    with serving(request.param, *SMALL, "--ui", env=keys) as running:
        yield running


def sentence(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, most)))


def conversation(draw: random.Random, earlier: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Return a new chat, or an earlier one with its last message cut or continued."""
    if earlier and draw.random() < 0.7:
        *before, last = draw.choice([earlier[-1], draw.choice(earlier)])
        content = last["content"]
        if draw.random() < 0.3:
            return [*before, last]
        cut = content[: draw.randrange(1, len(content) + 1)]
        return [*before, {**last, "content": cut + draw.choice(["", sentence(draw, 20)])}]
    messages = [{"role": "user", "content": sentence(draw, 60)}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": sentence(draw, 60)})
    return messages


def post(server: Server, path: str, key: str, **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}", "x-penstock-ui": "1"}
    url = f"{server.base_url}{path}"
    response = web.post(url, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def is_translator(server: Server) -> bool:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    models = web.get(f"{server.base_url}/v1/models", headers=headers).json()
    return bool(models["data"][0]["kind"] == "encoder-decoder")


def test_prompt_cached_tokens_equal_those_of_the_request_sent_next(server: Server) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    earlier: list[list[dict[str, str]]] = []
    found = set()
    long = [{"role": "user", "content": " ".join(WORDS * 6)}]
    for number in range(25):
        key = draw.choice(KEYS)
        messages = conversation(draw, earlier)
        if number >= 23:  # The last request finds its prefix, with any seed.
            key, messages = KEYS[0], long
        if is_translator(server):
            messages = messages[-1:]
        fields = {"messages": messages}
        shown = post(server, "/ui/api/prompt", key, **fields)
        # An answer may also end a block, whose beginning a later prompt reuses.
        tokens = draw.choice([1, draw.randrange(1, 24)])
        sent = post(
            server, "/v1/chat/completions", key, **fields, max_tokens=tokens, ignore_eos=True
        )
        usage = sent["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert shown["cached_tokens"] == cached, (seed, number)
        assert len(shown["ids"]) == usage["prompt_tokens"], (seed, number)
        found.add(cached)
        earlier.append(messages)
    assert len(found) > 1, "the traffic shares prefixes"


def test_prompt_of_another_tenant_is_never_cached(server: Server) -> None:
    text = " ".join(random.sample(WORDS, len(WORDS)) * 4)
    fields = {"messages": [{"role": "user", "content": text}]}
    post(server, "/v1/chat/completions", "alpha", **fields, max_tokens=2)
    assert post(server, "/ui/api/prompt", "alpha", **fields)["cached_tokens"] > 0
    for path in ("/ui/api/prompt", "/v1/chat/completions/render"):
        assert post(server, path, "beta", **fields)["cached_tokens"] == 0
