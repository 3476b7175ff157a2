"""Anthropic's Messages API of a real server: a stream, the count, and hits of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server.api.anthropic.test_writer import client_message, named_events
from tests.support.serve import Server

QUESTION = {"role": "user", "content": "What is the capital of France?"}
BODY: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 40, "temperature": 0}


@pytest.fixture
def http(demo: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=demo.base_url, timeout=120) as http:
        yield http


def system(nonce: str) -> list[dict[str, str]]:
    """Return a system prompt as Claude Code sends it, with a header that differs each time."""
    header = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
    texts = [header, "You are a helpful assistant. " * 10]
    return [{"type": "text", "text": text} for text in texts]


def test_stream_whole_answer_and_count_agree(http: httpx2.Client) -> None:
    whole = http.post("/v1/messages", json=BODY).json()
    assert "Paris" in whole["content"][0]["text"]
    assert whole["stop_reason"] == "end_turn"
    response = http.post("/v1/messages", json=BODY | {"stream": True})
    streamed = client_message(named_events(response.content))
    assert streamed["content"] == whole["content"]
    assert streamed["stop_reason"] == whole["stop_reason"]
    count = http.post("/v1/messages/count_tokens", json={"messages": [QUESTION]}).json()
    assert count == {"input_tokens": whole["usage"]["input_tokens"]}


def test_prefix_is_found_although_the_billing_header_differs(http: httpx2.Client) -> None:
    first = http.post("/v1/messages", json=BODY | {"system": system("1a2")}).json()["usage"]
    second = http.post("/v1/messages", json=BODY | {"system": system("f9e")}).json()["usage"]
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0.5 * first["input_tokens"]
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


def test_prefill_is_continued(http: httpx2.Client) -> None:
    prefill = {"role": "assistant", "content": "The capital of France"}
    answer = http.post("/v1/messages", json=BODY | {"messages": [QUESTION, prefill]}).json()
    assert answer["content"][0]["text"].startswith(" is Paris")
