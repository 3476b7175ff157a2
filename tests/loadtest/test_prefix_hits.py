"""Prefix hits of several servers: the cases, the two formats of responses, and the verdict."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.peers.jobs import Words
from loadtest.peers.prefix_hits import CASES, NEW, Answer, Hit, answer_of, compared, pairs, table
from loadtest.random_model import byte_tokenizer

IDS = tuple(range(NEW))


def answer(first: float = -1.0, ids: tuple[int, ...] = IDS, reused: int = 0) -> Answer:
    return Answer(ids, (first, *[-1.0] * (len(ids) - 1)), reused)


def test_pairs_begin_as_their_case_says() -> None:
    sent: list[list[int]] = []

    def send(prompt: list[int]) -> Answer:
        sent.append(prompt)
        return answer()

    found = pairs(send, Words(byte_tokenizer(400)))
    assert list(found) == list(CASES)
    assert sent[1::2] == [second for second, _ in found.values()]
    same, shorter, branch, turn = zip(sent[::2], sent[1::2], strict=True)
    assert same[0] == same[1]
    assert shorter[1] == shorter[0][:390]
    assert len(branch[1]) == 400
    assert branch[1][:250] == branch[0][:250]
    assert branch[1][250:260] != branch[0][250:260]
    assert turn[1][: 400 + NEW] == turn[0] + list(IDS)
    assert len(turn[1]) == 400 + NEW + 40
    assert len({tuple(first[:16]) for first in sent[::2]}) == len(CASES)


@pytest.mark.parametrize(
    ("choice", "rest"),
    [
        (
            {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -2.0]}},
            {"usage": {"prompt_tokens_details": {"cached_tokens": 3}}},
        ),
        (
            {"logprobs": {"content": [{"id": 5, "logprob": -0.5}, {"id": 6, "logprob": -2.0}]}},
            {"usage": {}, "timings": {"cache_n": 3}},
        ),
    ],
    ids=["older-format", "llama.cpp"],
)
def test_answer_of_both_formats_is_equal(choice: dict[str, Any], rest: dict[str, Any]) -> None:
    assert answer_of({"choices": [choice]} | rest) == Answer((5, 6), (-0.5, -2.0), 3)


def test_answer_of_a_response_without_cached_tokens_reused_none() -> None:
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}
    usage = {"prompt_tokens_details": None}
    assert answer_of({"choices": [choice], "usage": usage}).reused == 0


def test_compared_answer_with_equal_ids_has_the_error_of_its_logprobs() -> None:
    hit = compared(answer(-1.25, reused=384), answer(), 400)
    assert hit == Hit(400, 384, True, 0.25)


def test_compared_answer_with_other_ids_differs() -> None:
    hit = compared(answer(ids=(9, *IDS[1:])), answer(), 400)
    assert not hit.equal
    assert "**differs**" in table({"vllm": dict.fromkeys(CASES, hit)})


def test_compared_answer_of_a_server_that_was_not_fresh_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a fresh server reused 16 tokens"):
        compared(answer(), answer(reused=16), 400)


def test_compared_short_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="answers of 2 and 24 tokens"):
        compared(answer(ids=(1, 2)), answer(), 400)


def test_table_has_a_column_for_each_contender() -> None:
    hit = Hit(400, 384, True, 0.0)
    lines = table({name: dict.fromkeys(CASES, hit) for name in ("penstock", "vllm")}).splitlines()
    assert lines[0] == "| second prompt | penstock | vllm |"
    assert lines[2] == (
        "| the same again | 384 of 400 · equal, 0e+00 | 384 of 400 · equal, 0e+00 |"
    )
    assert len(lines) == 2 + len(CASES)
