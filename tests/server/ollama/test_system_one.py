"""POST /v1/systemone: probabilities of options, and what follows from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import log
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.protocol.generate import TokenLogprobs
from engine.protocol.outputs import TokenOutput
from server.ollama.system_one import confidence
from tests.server.ollama.conftest import ask
from tests.server.ollama.shapes import check_shape
from tests.support.fake_engine import FakeEngine, Running
from tests.support.rig import Served, serving

PATH = "/v1/systemone"
SHARES = (0.3, 0.1, 0.05)  # of the letters A, B and C; the rest of the vocabulary has the others
USAGE = {"input_tokens": int, "output_tokens": int}
NOUL = {"type": str, "noul": float, "option_mass": float}
SPREAD = {"probabilities": dict, "confidence": float, "option_mass": float}
CHOICE = {"type": str, "choice": str, **SPREAD}
SCORE = {"type": str, "score": float, "legend": dict, **SPREAD}


class LetterEngine(FakeEngine):
    """The tokens that a request names have the logprobs of SHARES, in their order."""

    def _sample(self, running: Running) -> TokenOutput:
        named = running.request.params.logprob_token_ids
        top = tuple(zip(named, map(log, SHARES), strict=False))
        output = super()._sample(running)
        return msgspec.structs.replace(output, logprobs=TokenLogprobs(-9.0, top))


@pytest.fixture
async def letters(model: Path) -> AsyncIterator[Served]:
    async with serving(LetterEngine(lambda request: [10]), model) as running:
        yield running


QUESTIONS: dict[str, Any] = {
    "kind": {
        "type": "choice",
        "instructions": "What is it?",
        "criteria": {"bill": "to pay", "spam": None, "other": "the rest"},
    },
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "tone": {"type": "score", "instructions": ["How", "rude?"], "criteria": ["not", "a bit", "so"]},
}


async def test_answers_are_the_shares_of_the_letters(letters: Served) -> None:
    answer = (await ask(letters, PATH, state={"mail": "Pay!"}, questions=QUESTIONS)).json()
    check_shape(answer, {"model": str, "answers": dict, "usage": USAGE})
    for name, shape in (("kind", CHOICE), ("urgent", NOUL), ("tone", SCORE)):
        check_shape(answer["answers"][name], shape)
    of_three = [share / 0.45 for share in SHARES]
    kind, urgent, tone = answer["answers"].values()
    assert kind["choice"] == "bill"
    assert list(kind["probabilities"]) == ["bill", "spam", "other"]
    assert list(kind["probabilities"].values()) == pytest.approx(of_three)
    assert kind["confidence"] == pytest.approx(0.5)
    assert kind["option_mass"] == pytest.approx(0.45)
    assert urgent["noul"] == pytest.approx(0.25)
    assert tone["score"] == pytest.approx(of_three[1] + 2 * of_three[2])
    assert tone["legend"] == {"0": "not", "1": "a bit", "2": "so"}
    assert list(tone["probabilities"].values()) == pytest.approx(of_three)


async def test_prompts_share_the_state_and_end_before_the_letter(letters: Served) -> None:
    await ask(letters, PATH, state="The mail.", questions=QUESTIONS)
    decode = letters.app.state.penstock.tokenizer.decode
    prompts = [decode(request.prompt) for request in letters.engine.requests]
    assert len(prompts) == 3
    for prompt in prompts:
        assert prompt.startswith("<user>The mail.\n\nQuestion: ")
        assert prompt.endswith("<assistant>Answer:")
    assert "A. bill: to pay\nB. spam\nC. other: the rest" in prompts[0]
    assert "A. false\nB. true" in prompts[1]
    assert 'Question: ["How","rude?"]' in prompts[2]
    usage = (await ask(letters, PATH, state="The mail.", questions=QUESTIONS)).json()["usage"]
    assert usage["input_tokens"] == sum(len(r.prompt) for r in letters.engine.requests[:3])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": {"a": {"type": "guess", "instructions": "b"}}}, "questions.a"),
        ({"questions": {"a": {**QUESTIONS["kind"], "criteria": {}}}}, "questions.a"),
        ({"questions": {"a": {**QUESTIONS["tone"], "criteria": ["a"] * 53}}}, "questions.a"),
        ({"stream": True}, "stream"),
        ({"state": "a" * 600}, "512 tokens"),
        ({"state": 5}, "state"),
    ],
)
async def test_system_one_refuses_by_name(
    letters: Served, fields: dict[str, Any], name: str
) -> None:
    response = await ask(letters, PATH, **{"state": "a", "questions": QUESTIONS, **fields})
    assert response.status_code == 400, response.text
    assert name in response.json()["error"]
    assert not letters.engine.requests


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.5, 0.5), 0), ((1.0, 0.0), 1), ((0.25, 0.75), 0.5), ((1.0,), 1), ((1 / 3,) * 3, 0)],
)
def test_confidence_is_0_for_equal_shares_and_1_for_a_certain_one(
    shares: tuple[float, ...], expected: float
) -> None:
    assert confidence(shares) == pytest.approx(expected)
