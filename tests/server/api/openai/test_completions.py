"""/v1/completions: shapes of prompts, echo and logprobs."""

from __future__ import annotations

import json
import shutil

import pytest

from engine.protocol.generate import TokenLogprobs
from server.api.openai.logprobs import completion_logprobs
from server.generation.events import TokenWithLogprobs
from tests.server.conftest import BOS, EOS
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 64, 65]]),
        (["ab", "c"], [[BOS, 64, 65], [BOS, 66]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_completions_prompt_of_any_shape_reaches_the_engine(served, prompt, ids):
    body = (await served.complete(prompt=prompt, n=2)).json()
    requests = served.engine.requests
    assert [r.prompt for r in requests] == [p for p in ids for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert requests[1].params.seed - requests[0].params.seed == 1
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_completions_empty_prompt_begins_a_document(served, model, says, tmp_path):
    """With BOS, or else with the EOS that separates documents, as OpenAI's default prompt does."""
    await served.complete(prompt="")
    assert [r.prompt for r in served.engine.requests] == [[BOS]]
    folder = shutil.copytree(model, tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS}))
    async with serving(FakeEngine(says("x")), folder) as bare:
        answer = await bare.complete(prompt=["", "ab"], echo=True, logprobs=0, max_tokens=3)
        assert [r.prompt for r in bare.engine.requests] == [[EOS], [64, 65]]
    first, second = answer.json()["choices"]
    assert (first["text"], second["text"]) == ("x", "abx")
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["text_offset"][:2] == [0, 0]


async def test_completions_take_integers_with_a_point(served):
    """JSON Schema says that 5.0 is an integer, and clients written in Lua or Go send it."""
    await served.complete(prompt=[64.0, 65], max_tokens=3.0, seed=-7.0, stop_token_ids=[9.0])
    [request] = served.engine.requests
    assert request.prompt == [64, 65]
    assert all(type(token) is int for token in request.prompt)
    params = request.params
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (3, -7, (9, EOS))


async def test_completions_openai_client_receives_answer(served):
    answer = await served.openai.completions.create(model="tiny", prompt="Hi", best_of=1)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello wörld!"
    assert answer.choices[0].finish_reason == "stop"


async def test_completions_default_max_tokens_are_those_of_openai(served):
    """16; a chat instead may fill the context."""
    await served.complete(prompt=["a" * 10, "b" * 506])
    assert [r.params.max_tokens for r in served.engine.requests] == [16, 5]
    await served.chat()
    assert served.engine.requests[-1].params.max_tokens > 400


async def test_names_of_llama_cpp_and_ollama_are_those_of_openai(served):
    names = ("n_predict", "num_predict", "max_new_tokens", "max_tokens")
    for fields in ({name: 7} for name in names):
        answer = await served.complete(prompt="a", repeat_penalty=1.25, **fields)
        assert "x-ignored-params" not in answer.headers
        params = served.engine.requests[-1].params
        assert (params.max_tokens, params.repetition_penalty) == (7, 1.25)
    await served.chat(n_predict=-1)
    assert served.engine.requests[-1].params.max_tokens > 400
    answer = await served.complete(prompt="a", n_predict=-2)
    assert answer.json()["error"]["param"] == "n_predict"


async def test_allowed_token_ids_reach_the_engine(served):
    await served.complete(prompt="a", allowed_token_ids=[7, 5, 7])
    assert served.engine.requests[-1].params.allowed_token_ids == (5, 7)
    await served.complete(prompt="a", allowed_token_ids=[])
    assert served.engine.requests[-1].params.allowed_token_ids == ()
    for fields in ({"allowed_token_ids": [258]}, {"allowed_token_ids": [EOS], "min_tokens": 1}):
        answer = await served.complete(prompt="a", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


async def test_bad_words_reach_the_engine_with_and_without_a_space(served, encode):
    await served.complete(prompt="a", bad_words=["ab", " ab", "  ", "c"])
    due = [encode("ab"), encode(" ab"), encode("  "), encode("   "), encode("c"), encode(" c")]
    banned = served.engine.requests[-1].params.banned_sequences
    assert banned == tuple(map(tuple, due))
    await served.chat(bad_words=[])
    assert served.engine.requests[-1].params.banned_sequences == ()
    answer = await served.complete(prompt="a", bad_words=["€" * 64] * 3 + ["x" * 64] * 128)
    assert answer.json()["error"]["param"] == "bad_words"
    answer = await served.complete(prompt="a", bad_words=[f"{n:060}" for n in range(20)])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")


async def test_truncate_prompt_tokens_keeps_the_last_and_is_named(served):
    body = {"prompt": "abcdef", "max_tokens": 2}
    for name in ("truncate_prompt_tokens", "truncate"):
        answer = await served.complete(**body, **{name: 3})
        assert answer.headers["x-adjusted-params"] == "truncate_prompt_tokens=3"
        assert served.engine.requests[-1].prompt == [BOS, 68, 69], "BOS stays and counts"
        assert answer.json()["usage"]["prompt_tokens"] == 3
    await served.complete(**body, truncate_prompt_tokens=1)
    assert served.engine.requests[-1].prompt == [69]
    answer = await served.complete(prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2)
    assert [request.prompt for request in served.engine.requests[-2:]] == [[2, 3], [4]]
    answer = await served.complete(**body, truncate_prompt_tokens=7)
    assert "x-adjusted-params" not in answer.headers
    answer = await served.chat(truncate_prompt_tokens=4)
    assert len(served.engine.requests[-1].prompt) == 4


@pytest.mark.parametrize(
    ("fields", "length"),
    [({"max_tokens": 100}, 412), ({}, 496), ({"max_tokens": 32_000}, 256)],
    ids=["room", "default", "half"],
)
async def test_truncate_prompt_tokens_of_minus_one_leaves_room_for_the_answer(
    served, fields, length
):
    answer = await served.complete(prompt="a" * 5000, truncate_prompt_tokens=-1, **fields)
    assert answer.status_code == 200
    request = served.engine.requests[-1]
    assert (len(request.prompt), request.prompt[0]) == (length, BOS)
    assert f"truncate_prompt_tokens={length}" in answer.headers["x-adjusted-params"]


async def test_truncate_prompt_tokens_above_the_context_is_refused_as_too_long(served):
    answer = await served.complete(prompt="a" * 5000, truncate_prompt_tokens=600)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_answers_have_the_fingerprint_of_model_and_version(served):
    answers = [(await served.complete(prompt="a")).json(), (await served.chat()).json()]
    prints = {answer["system_fingerprint"] for answer in answers}
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")
    stream = (await served.chat(stream=True)).text
    assert stream.count('"system_fingerprint":"fp_') == stream.count("data: {")


async def test_empty_model_name_means_the_served_one(served):
    assert (await served.complete(prompt="a", model="")).json()["model"] == "tiny"


async def test_completions_max_completion_tokens_overrides_max_tokens(served):
    """The field belongs to the chat API. Completions accept it, with the same precedence."""
    await served.complete(prompt="a", max_completion_tokens=3)
    await served.complete(prompt="a", max_completion_tokens=3, max_tokens=5)
    assert [r.params.max_tokens for r in served.engine.requests] == [3, 3]


async def test_completions_echo_begins_with_prompt(served):
    body = (await served.complete(prompt=["ab", "cd"], echo=True)).json()
    assert [c["text"] for c in body["choices"]] == ["abHello wörld!", "cdHello wörld!"]
    body = (await served.complete(prompt=[64, 65], echo=True)).json()
    assert body["choices"][0]["text"] == "abHello wörld!"
    body = (await served.complete(prompt=[BOS, 64], echo=True, skip_special_tokens=False)).json()
    assert body["choices"][0]["text"].startswith("<s>aHello")
    served.engine.burst = 100
    text = (await served.complete(prompt="ab", echo=True, stream=True)).text
    assert '"text":"abHello' in text


async def test_completions_logprobs_have_openai_format(served):
    answer = await served.openai.completions.create(model="tiny", prompt="Hi", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:3] == ["H", "e", "l"]
    assert logprobs.token_logprobs == [-0.5] * 13
    assert logprobs.top_logprobs[0] == {"H": -0.5, "G": -1.5}
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11]


async def test_completion_logprobs_sampled_token_outside_top_comes_first(served, encode):
    choice = (await served.complete(logprobs=0)).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][:2] == [{"H": -0.5}, {"e": -0.5}]
    sampled, first, second = encode("Hxy")
    item = TokenWithLogprobs(sampled, TokenLogprobs(-3.0, ((first, -0.1), (second, -0.2))), 0)
    found = completion_logprobs(served.app.state.penstock.tokenizer, [item])["top_logprobs"]
    assert list(found[0].items()) == [("H", -3.0), ("x", -0.1), ("y", -0.2)]


async def test_completion_logprobs_tokens_of_equal_text_keep_higher_logprob(served, encode):
    sampled, first, _, second = encode("éñ")  # halves of characters
    item = TokenWithLogprobs(sampled, TokenLogprobs(-3.0, ((first, -0.1), (second, -0.2))), 0)
    found = completion_logprobs(served.app.state.penstock.tokenizer, [item])["top_logprobs"]
    assert found == [{"\ufffd": -0.1}]


async def test_completions_return_token_ids_returns_prompt_and_answer_ids(served, encode):
    for stream in (False, True):
        response = await served.complete(prompt=[1, 2], return_token_ids=True, stream=stream)
        text = response.text
        assert '"prompt_token_ids":[1,2]' in text
    ids = [*encode("Hello wörld!"), EOS]
    choice = (await served.complete(return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == ids
