"""Limits of API keys: token buckets, refusals, headers, and the limits in the key file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.errors import ApiError
from server.http.key_file import read_limited_keys
from server.http.key_limits import KeyLimits, parse_limits
from server.http.rate_limits import RateLimiter, duration
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

KEY_FILE = """# ours
free
slow requests_per_minute=2
small tokens_per_minute=40	
narrow   concurrent_requests=1
both requests_per_minute=100 tokens_per_minute=1000 concurrent_requests=9
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusal(limiter: RateLimiter) -> ApiError:
    with pytest.raises(ApiError) as refused:
        limiter.begin()
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    return refused.value


def test_limiter_refills_steadily() -> None:
    clock = Clock()
    limiter = RateLimiter(KeyLimits(requests_per_minute=6), clock)
    for _ in range(6):
        limiter.begin()
    assert "6 requests per minute" in refusal(limiter).message
    clock.now += 7
    assert refusal(limiter).headers["retry-after"] == "3"
    assert limiter.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "53s",
    }
    clock.now += 3
    limiter.begin()
    clock.now += 600
    assert limiter.headers()["x-ratelimit-remaining-requests"] == "6", "no more than it holds"


def test_limiter_counts_tokens_that_exceed_the_limit_as_debt() -> None:
    clock = Clock()
    limiter = RateLimiter(KeyLimits(tokens_per_minute=60), clock)
    limiter.begin()
    limiter.use_tokens(150)
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert limiter.headers()["x-ratelimit-reset-tokens"] == "2m30s"
    assert refusal(limiter).headers["retry-after"] == "91"
    clock.now += 91
    limiter.begin()


def test_limiter_with_a_large_debt_asks_for_a_retry_within_two_minutes() -> None:
    clock = Clock()
    limiter = RateLimiter(KeyLimits(tokens_per_minute=60), clock)
    limiter.begin()
    limiter.use_tokens(600)
    assert refusal(limiter).headers["retry-after"] == "119"
    assert "Retry in 541 s" in refusal(limiter).message


def test_limiter_refused_request_takes_nothing() -> None:
    clock = Clock()
    limits = KeyLimits(requests_per_minute=2, tokens_per_minute=60, concurrent_requests=1)
    limiter = RateLimiter(limits, clock)
    limiter.begin()
    refusal(limiter)
    limiter.use_tokens(60)
    limiter.end()
    refusal(limiter)
    assert limiter.headers()["x-ratelimit-remaining-requests"] == "1"
    clock.now += 2
    limiter.begin()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0004, "1ms"), (0.5, "500ms"), (1, "1s"), (59.5, "1m0s"), (360, "6m0s")],
)
def test_duration_is_written_as_in_openai(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def config(tmp_path: Path, text: str = KEY_FILE) -> ServerConfig:
    file = tmp_path / "keys"
    file.write_text(text)
    return ServerConfig(api_key_file=str(file))


def test_key_file_has_limits_behind_keys(tmp_path: Path) -> None:
    keys = {key.text: key.limits for key in read_limited_keys(config(tmp_path))}
    assert keys == {
        "free": KeyLimits(),
        "slow": KeyLimits(requests_per_minute=2),
        "small": KeyLimits(tokens_per_minute=40),
        "narrow": KeyLimits(concurrent_requests=1),
        "both": KeyLimits(100, 1000, 9),
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "key rpm=5",
            "'rpm' is not a setting of a key; .* concurrent_requests, label, priority",
        ),
        ("key tokens_per_minute=0", "tokens_per_minute must be a number from 1 to 999999999"),
        ("key tokens_per_minute=1e3", "must be a number"),
        ("key tokens_per_minute=9999999999", "must be a number"),
        ("key tokens_per_minute 5", "white space"),
        ("key  # Alice", "white space"),
    ],
)
def test_key_file_with_a_wrong_limit_is_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_limited_keys(config(tmp_path, line))


def test_parse_limits_without_words_is_no_limit() -> None:
    assert parse_limits([]) == KeyLimits()


def test_reload_keeps_the_counts_of_unchanged_limits(tmp_path: Path) -> None:
    keys = ApiKeys(partial(read_limited_keys, config(tmp_path)))
    names = {text: keys.find(text.encode()) for text in ("free", "slow", "small")}
    before = {text: keys.limiter(name or "") for text, name in names.items()}
    assert before["free"] is None
    config(tmp_path, KEY_FILE.replace("small tokens_per_minute=40", "small tokens_per_minute=9"))
    keys.reload()
    after = {text: keys.limiter(name or "") for text, name in names.items()}
    assert after["slow"] is before["slow"]
    assert after["small"] is not None
    assert after["small"].limits.tokens_per_minute == 9
    config(tmp_path, "free\nslow\n")
    keys.reload()
    assert keys.limiter(names["slow"] or "") is None


@pytest.fixture
async def limited(model: Path, says: Any, tmp_path: Path) -> AsyncIterator[Served]:
    file = tmp_path / "keys"
    file.write_text(KEY_FILE)
    async with serving(FakeEngine(says("Hello wörld!")), model, api_key_file=str(file)) as served:
        yield served


def use(served: Served, key: str) -> None:
    served.http.headers["authorization"] = f"Bearer {key}"


async def test_requests_beyond_the_limit_of_their_key_are_429(limited: Served) -> None:
    use(limited, "slow")
    remaining = []
    for _ in range(2):
        answer = await limited.complete()
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        remaining.append(answer.headers["x-ratelimit-remaining-requests"])
    assert remaining == ["1", "0"]
    answer = await limited.complete()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await limited.http.get("/v1/models")).status_code == 200, "only bodies count"
    assert len(limited.engine.requests) == 2
    assert await limited.metric("rejects_total", code="rate_limit_exceeded") == 1
    use(limited, "free")
    answer = await limited.complete()
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_are_counted(limited: Served, stream: bool) -> None:
    use(limited, "small")
    answer = await limited.complete(prompt="abcdef", n=2, stream=stream)  # 7 and 28 tokens
    assert answer.status_code == 200
    if not stream:
        assert answer.headers["x-ratelimit-remaining-tokens"] == "5"
    answer = await limited.complete(prompt="abcdef")
    assert answer.status_code == 200, "a token is left"
    answer = await limited.complete()
    assert answer.status_code == 429
    assert "40 tokens per minute" in answer.json()["error"]["message"]


async def test_refused_bodies_count_as_requests_without_tokens(limited: Served) -> None:
    use(limited, "both")
    answer = await limited.complete(temperature=9)
    assert answer.status_code == 400
    assert answer.headers["x-ratelimit-remaining-requests"] == "99"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "1000"


async def test_concurrent_requests_beyond_the_limit_are_429(limited: Served) -> None:
    use(limited, "narrow")
    limited.engine.gate.clear()
    first = asyncio.create_task(limited.complete(stream=True))
    await eventually(lambda: bool(limited.engine.requests), "the first request runs")
    answer = await limited.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "1 concurrent requests" in answer.json()["error"]["message"]
    limited.engine.gate.set()
    assert (await first).status_code == 200
    assert (await limited.complete()).status_code == 200, "its place is free again"


async def test_tokens_of_embeddings_are_counted(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k tokens_per_minute=100")
    encoder = FakeEncoder(lambda request: [])
    async with serving(encoder, model, key="k", api_key_file=str(file)) as served:
        answer = await served.http.post("/v1/embeddings", json={"input": ["ab", "d"]})
        used = answer.json()["usage"]["total_tokens"]
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - used)
        answer = await served.http.post("/v1/score", json={"text_1": "a", "text_2": "b"})
        used += answer.json()["usage"]["total_tokens"]
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) in (100 - used, 101 - used)
