"""Explained answers of a real server equal those of transformers and a sampler in NumPy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from engine.checkpoint.folder import model_folder
from tests.support.draws import Draw, DrawOracle, random_body
from tests.support.serve import Server, serving

UI = {"x-penstock-ui": "1"}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def oracle() -> DrawOracle:
    return DrawOracle(model_folder("demo"))


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32") as server:
        yield server


async def answered(http: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def explained(
    http: httpx2.AsyncClient, choice: dict[str, Any], body: dict[str, Any]
) -> dict[str, Any]:
    wanted = {
        "prompt_ids": choice["prompt_token_ids"],
        "answer_ids": choice["token_ids"],
        "params": body,
    }
    response = await http.post("/ui/api/explain", json=wanted, headers=UI)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    report: dict[str, Any] = response.json()
    return report


def check_token(row: list[Any], draw: Draw, tolerance: float) -> None:
    """Compare one token of a report with the reference."""
    token, rank, entropy, final_entropy, kept, mass, _, candidates, _ = row
    above = int((draw.logits > draw.logits[token] + 10 * tolerance).sum())
    below = int((draw.logits >= draw.logits[token] - 10 * tolerance).sum())
    assert above < rank <= below
    assert entropy == pytest.approx(-(draw.raw * np.log2(draw.raw)).sum(), abs=50 * tolerance)
    is_exact = tolerance == TOLERANCE["float32"]
    if is_exact and not draw.is_close.any():
        final = draw.final[draw.final > 0]
        assert kept == draw.kept
        assert mass == pytest.approx(draw.mass, abs=tolerance)
        assert final_entropy == pytest.approx(-(final * np.log2(final)).sum(), abs=50 * tolerance)
    for one, logit, raw, adjusted, tempered, cut, luck in candidates:
        assert logit == pytest.approx(draw.logits[one], abs=100 * tolerance)
        assert raw == pytest.approx(draw.raw[one], abs=tolerance)
        assert adjusted == pytest.approx(draw.adjusted[one], abs=tolerance)
        assert tempered == pytest.approx(draw.tempered[one], abs=tolerance)
        if is_exact and not draw.is_close[one]:
            assert cut == draw.cuts[one]
        assert luck == (None if draw.is_greedy else pytest.approx(draw.luck(one), rel=1e-6))
    listed = [entry[0] for entry in candidates]
    assert token in listed
    clearly = np.flatnonzero(draw.adjusted > np.sort(draw.adjusted)[-33] + tolerance)
    assert set(clearly) <= set(listed)


async def test_top_k_beyond_the_allowed_tokens_keeps_no_banned_one(
    demo: Server, oracle: DrawOracle
) -> None:
    allowed = {"allowed_token_ids": list(range(100, 120)), "ignore_eos": True}
    body = {"prompt": "A river", "seed": 3, "max_tokens": 8, "temperature": 1.0, "top_p": 1.0}
    await check_explanation(demo, oracle, body | allowed | {"top_k": 40})


@pytest.mark.variants(8)
@pytest.mark.parametrize("number", range(20))
async def test_explained_answer_equals_the_reference(
    demo: Server, oracle: DrawOracle, number: int
) -> None:
    await check_explanation(demo, oracle, random_body(random.Random()))


async def check_explanation(demo: Server, oracle: DrawOracle, body: dict[str, Any]) -> None:
    """Compare the explanation of an answer to `body` with the reference."""
    async with demo.http() as http:
        choice = await answered(http, body)
        report = await explained(http, choice, body)
    prompt, answer = choice["prompt_token_ids"], choice["token_ids"]
    draws = oracle.explain(prompt, answer, body)
    assert report["agrees"] == len(answer) == len(report["tokens"])
    for row, draw, sent in zip(report["tokens"], draws, answer, strict=True):
        assert row[0] == row[8] == sent
        assert draw.winner() in (sent, None)
        check_token(row, draw, TOLERANCE["float32"])


@pytest.mark.slow
async def test_explained_bfloat16_answer_is_near_the_reference(oracle: DrawOracle) -> None:
    body = {"prompt": "A river", "seed": 7, "max_tokens": 40, "temperature": 0.8}
    with serving("demo", "--dtype", "bfloat16") as server:
        async with server.http() as http:
            choice = await answered(http, body)
            report = await explained(http, choice, body)
    draws = oracle.explain(choice["prompt_token_ids"], choice["token_ids"], body)
    for row, draw in zip(report["tokens"], draws, strict=True):
        check_token(row, draw, TOLERANCE["bfloat16"])


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.variants(2)
async def test_grammar_is_applied_again(demo: Server, seed: int) -> None:
    """The draws agree only with the grammar, and it removes likely tokens."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"seed": seed, "temperature": 1.0, "top_p": 1.0, "response_format": schema}
    async with demo.http() as http:
        choice = await answered(http, body | {"prompt": "Anna is", "max_tokens": 100})
        report = await explained(http, choice, body)
        without = await explained(http, choice, body | {"response_format": {"type": "text"}})
    count = len(choice["token_ids"])
    assert report["agrees"] == count > without["agrees"]
    cuts = {one[5] for row in report["tokens"] for one in row[7]}
    assert 5 in cuts
    for row in report["tokens"]:
        assert sum(one[3] for one in row[7] if one[5] == 5) == 0


@pytest.mark.slow
async def test_answers_of_a_crowded_server_redraw_equally() -> None:
    """50 sampled answers in a batch of 16 with preemptions, explained all at once."""
    flags = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "40", "--max-model-len", "512")
    with serving("demo", "--block-size", "16", *flags) as server:
        rng = random.Random()
        bodies = [random_body(rng) | {"max_tokens": 100, "ignore_eos": True} for _ in range(50)]
        for body in bodies:
            body["min_tokens"] = min(body.get("min_tokens", 0), 100)
        async with server.http() as http:
            choices = await asyncio.gather(*[answered(http, body) for body in bodies])
            assert server.metric("num_preemptions_total") > 0
            pairs = zip(choices, bodies, strict=True)
            reports = await asyncio.gather(*[explained(http, *pair) for pair in pairs])
        server.wait_idle()
    for choice, report in zip(choices, reports, strict=True):
        assert report["agrees"] == len(choice["token_ids"]) == len(report["tokens"])
