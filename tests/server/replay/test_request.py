"""A recorded answer as a request: the server must send the engine the same parameters again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.protocol.generate import Grammar, SamplingParams
from server.replay.recorded import RecordedGrammar, params_fields
from server.replay.request import CannotReplay, replay_body, replayed_tokens
from tests.server.conftest import EOS
from tests.server.replay.test_recorded import answer
from tests.support.fake_engine import INFO
from tests.support.recorded import written_record
from tests.support.rig import Served

VOCAB = INFO.vocab_size


REQUESTS: list[dict[str, Any]] = [
    {},
    {"seed": -(2**63), "n": 2, "max_tokens": 3},
    {"seed": 2**63 - 1},
    {"temperature": 0, "top_k": -1, "top_p": 0, "min_p": 0.1},
    {"temperature": 0.1, "top_p": 0.3, "repetition_penalty": 1.3, "presence_penalty": -2},
    {"frequency_penalty": 1.1, "logit_bias": {"7": 1.1, "8": -100}, "allowed_token_ids": [3, 7]},
    {"min_tokens": 4, "stop_token_ids": [3, 4], "ignore_eos": True, "max_tokens": 9},
    {"bad_words": ["the", " a"], "logprobs": 3, "prompt_logprobs": 2, "echo": True},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {}}}}},
    {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'root ::= "a"+'}},
    {"structured_outputs": {"grammar": 'start: "a"+'}},
    {"guided_json": {"type": "object"}},
    {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
]


@pytest.mark.variants(7)
@pytest.mark.parametrize("fields", REQUESTS, ids=lambda fields: "-".join(fields) or "none")
async def test_replay_makes_the_same_engine_request(
    recording: Served, record_file: Path, fields: dict[str, Any]
) -> None:
    assert (await recording.complete(**fields)).status_code == 200
    originals = [request.params for request in recording.engine.requests]
    answers = await written_record(record_file, len(originals))
    for recorded, params in zip(list(answers.values()), originals, strict=True):
        response = await recording.http.post("/v1/completions", json=replay_body(recorded, VOCAB))
        assert response.status_code == 200, response.text
        request = recording.engine.requests[-1]
        assert request.prompt == recorded.prompt_ids
        assert _comparable(request.params) == _comparable(params)
        assert replayed_tokens(recorded, response.json()) == recorded.tokens


def _comparable(params: SamplingParams) -> SamplingParams:
    """Return the parameters without the name of the field with the grammar."""
    if params.grammar is None:
        return params
    grammar = msgspec.structs.replace(params.grammar, param="")
    return msgspec.structs.replace(params, grammar=grammar)


async def test_seed_that_means_random_is_replayed_as_a_second_choice(
    recording: Served, record_file: Path
) -> None:
    await recording.complete(seed=-2, n=2)
    recorded = (await written_record(record_file, 2))[2]
    assert recorded.sampling.seed == -1
    response = await recording.http.post("/v1/completions", json=replay_body(recorded, VOCAB))
    assert [each.params.seed for each in recording.engine.requests[-2:]] == [-2, -1]
    body = response.json()
    body["choices"][1]["token_ids"] = [5]
    assert replayed_tokens(recorded, body) == [5]


async def test_answer_cut_by_a_stop_text_is_replayed_to_its_length(
    recording: Served, record_file: Path
) -> None:
    await recording.complete(stop="l", max_tokens=40, min_tokens=2)
    recorded = (await written_record(record_file, 1))[1]
    response = await recording.http.post("/v1/completions", json=replay_body(recorded, VOCAB))
    assert len(recorded.tokens) == 3
    assert replayed_tokens(recorded, response.json()) == recorded.tokens


def test_bans_of_the_checkpoint_and_tokens_beyond_the_vocabulary_are_not_sent() -> None:
    params = SamplingParams(
        max_tokens=3, logit_bias=((1, float("-inf")), (2, 0.5)), stop_token_ids=(EOS, VOCAB)
    )
    body = replay_body(answer(params=params_fields(params)), VOCAB)
    assert body["logit_bias"] == {"2": 0.5}
    assert body["stop_token_ids"] == [EOS]


def test_source_of_an_encoder_decoder_is_the_prompt() -> None:
    recorded = answer(prompt_ids=[0], encoder_prompt_ids=[5, 6])
    assert replay_body(recorded, VOCAB)["prompt"] == [5, 6]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (RecordedGrammar("json_schema", {}, None, "start: @answer"), "reasoning or tool calls"),
        (RecordedGrammar("later", "x"), "kind later"),
        (RecordedGrammar("lark", 'start: "::="'), "GBNF"),
        (None, "only as the engine's"),
    ],
)
def test_grammar_without_a_field_is_refused_by_name(
    grammar: RecordedGrammar | None, reason: str
) -> None:
    params = SamplingParams(max_tokens=3, grammar=Grammar("x", (1,), "tools"))
    with pytest.raises(CannotReplay, match=reason):
        replay_body(answer(params=params_fields(params), grammar=grammar), VOCAB)


def test_lark_grammar_of_a_tool_call_is_a_grammar() -> None:
    params = SamplingParams(max_tokens=3, grammar=Grammar("x", (1,), "tools"))
    recorded = answer(params=params_fields(params), grammar=RecordedGrammar("lark", 'start: "a"'))
    assert replay_body(recorded, VOCAB)["structured_outputs"] == {"grammar": 'start: "a"'}
