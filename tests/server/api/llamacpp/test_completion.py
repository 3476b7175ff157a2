"""/completion and /infill: prompts, answers, biases and refusals of llama.cpp's API."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from server.generation.infill import FORMATS
from tests.server.conftest import BOS, EOS, byte_tokenizer, write_model
from tests.support.fake_engine import INFO, FakeEngine, Script
from tests.support.rig import Served, serving

Encode = Callable[[str], list[int]]


async def complete(served: Served, path: str = "/completion", **body: Any) -> httpx2.Response:
    return await served.http.post(path, json={"prompt": "ab", **body})


async def events(served: Served, **body: Any) -> list[dict[str, Any]]:
    text = (await complete(served, stream=True, **body)).text
    parts = [part for part in text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_completion_whole_answer_has_llama_cpps_fields(
    served: Served, encode: Encode
) -> None:
    body = (await complete(served, return_tokens=True, temperature=0, seed=3)).json()
    assert body["content"] == "Hello wörld!"
    assert body["tokens"] == [*encode("Hello wörld!"), EOS]
    assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "eos", "")
    assert (body["index"], body["id_slot"], body["model"]) == (0, -1, "tiny")
    assert body["tokens_evaluated"] == 3
    assert body["tokens_predicted"] == len(body["tokens"])
    assert body["tokens_cached"] == 3 + len(body["tokens"])
    assert body["prompt"] == "<s>ab"
    assert (body["truncated"], body["has_new_line"]) == (False, False)
    assert body["timings"]["prompt_n"] + body["timings"]["cache_n"] == 3
    settings = body["generation_settings"]
    assert (settings["seed"], settings["temperature"], settings["n_predict"]) == (3, 0.0, -1)
    assert settings["top_k"] == 20  # of the checkpoint
    assert settings["logit_bias"] == []
    # Samplers that requests cannot turn on.
    assert (settings["mirostat"], settings["typical_p"], settings["adaptive_target"]) == (0, 1, -1)
    assert (settings["dry_multiplier"], settings["xtc_probability"]) == (0, 0)
    assert "completion_probabilities" not in body


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_completion_without_return_tokens_has_none(served: Served, path: str) -> None:
    assert (await complete(served, path)).json()["tokens"] == []


async def test_completion_stream_parts_join_to_the_whole_answer(served: Served) -> None:
    *parts, end = await events(served, n_predict=100)
    whole = (await complete(served, n_predict=100, return_tokens=True)).json()
    assert "".join([part["content"] for part in parts]) + end["content"] == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert all(part["stop"] is False for part in parts)
    assert end["stop"] is True
    assert end["tokens_predicted"] == whole["tokens_predicted"]
    assert end.keys() == whole.keys()


async def test_completion_says_why_it_ended(served: Served) -> None:
    cut = (await complete(served, n_predict=3)).json()
    assert (cut["stop_type"], cut["truncated"], cut["tokens_predicted"]) == ("limit", False, 3)
    word = (await complete(served, stop=["wör", "x"])).json()
    assert (word["content"], word["stop_type"]) == ("Hello ", "word")
    assert word["stopping_word"] == "wör"


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_past_its_time_ends_with_the_next_line(
    model: Path, says: Callable[[str], Script], stream: bool
) -> None:
    async def text_and_end(slow: Served, **fields: Any) -> tuple[str, str]:
        if not stream:
            body = (await complete(slow, **fields)).json()
            return body["content"], body["stop_type"]
        parts = await events(slow, **fields)
        return "".join([part["content"] for part in parts]), parts[-1]["stop_type"]

    async with serving(FakeEngine(says("ab\ncd\nef"), delay=0.02), model) as slow:
        assert await text_and_end(slow, t_max_predict_ms=1) == ("ab\n", "limit")
        assert await text_and_end(slow, t_max_predict_ms=60_000) == ("ab\ncd\nef", "eos")
        for off in (0, -1, None):
            assert (await text_and_end(slow, t_max_predict_ms=off))[1] == "eos"
        # A line break that begins a stop string is held back, and the stop string wins.
        held = {"t_max_predict_ms": 1, "stop": ["\ncd"]}
        assert await text_and_end(slow, **held) == ("ab", "word")


async def test_completion_past_its_time_without_lines_goes_on(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("abcdef"), delay=0.01), model) as slow:
        body = (await complete(slow, t_max_predict_ms=1)).json()
        assert (body["content"], body["stop_type"]) == ("abcdef", "eos")
        assert body["generation_settings"]["t_max_predict_ms"] == 1


async def test_completion_that_fills_the_context_is_truncated(model: Path, encode: Encode) -> None:
    async with serving(FakeEngine(lambda request: encode("a" * 600)), model) as endless:
        body = (await complete(endless, n_predict=-1)).json()
        assert (body["tokens_predicted"], body["truncated"]) == (509, True)
        body = (await complete(endless, n_predict=509)).json()
        assert (body["tokens_predicted"], body["truncated"]) == (509, False)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ([1, 2], [[1, 2]]),
        ([5, "ab", 6], [[5, 64, 65, 6]]),
        (["ab", 7], [[BOS, 64, 65, 7]]),
        ({"prompt_string": "b"}, [[BOS, 65]]),
        (["a", [3, "b"], {"prompt_string": "b"}], [[BOS, 64], [3, 65], [BOS, 65]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_completion_takes_prompts_of_every_shape(
    served: Served, prompt: Any, wanted: list[list[int]]
) -> None:
    body = (await complete(served, prompt=prompt)).json()
    assert [request.prompt for request in served.engine.requests] == wanted
    if len(wanted) > 1:
        assert [answer["index"] for answer in body] == list(range(len(wanted)))
    else:
        assert body["content"] == "Hello wörld!"


async def test_completion_without_a_seed_has_the_servers(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("x")), model, seed=42) as seeded:
        for _ in range(2):
            body = (await complete(seeded, n_cmpl=2)).json()
            assert [answer["generation_settings"]["seed"] for answer in body] == [42, 42]
        await complete(seeded, seed=7)
        await complete(seeded, seed=-1)
        chat = {"messages": [{"role": "user", "content": "a"}], "seed": None}
        await seeded.http.post("/v1/chat/completions", json=chat)
        seeds = [request.params.seed for request in seeded.engine.requests]
        assert seeds[:5] == [42, 43, 42, 43, 7]
        assert seeds[5] not in (-1, 42)  # random
        assert seeds[6] == 42
        props = (await seeded.http.get("/props")).json()
        assert props["default_generation_settings"]["params"]["seed"] == 42


async def test_completion_answers_each_prompt_several_times(served: Served) -> None:
    body = (await complete(served, n_cmpl=3, seed=5)).json()
    assert len(body) == 3
    assert [request.params.seed for request in served.engine.requests] == [5, 6, 7]


async def test_completion_probabilities_have_one_entry_per_token(served: Served) -> None:
    body = (await complete(served, n_probs=2, n_predict=4)).json()
    entries = body["completion_probabilities"]
    assert len(entries) == 4
    assert entries[0].keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert entries[0]["token"] == "H"
    assert entries[0]["bytes"] == [72]
    assert len(entries[0]["top_logprobs"]) == 2
    *parts, _ = await events(served, n_probs=2, n_predict=4)
    assert [part["completion_probabilities"] for part in parts] == [[entry] for entry in entries]


async def test_completion_post_sampling_probs_are_probabilities(served: Served) -> None:
    fields = {"n_probs": 2, "n_predict": 4, "post_sampling_probs": True, "backend_sampling": True}
    body = (await complete(served, **fields)).json()
    assert "backend_sampling" not in body["generation_settings"]
    assert body["generation_settings"]["post_sampling_probs"] is True
    [request] = served.engine.requests
    assert request.params.final_logprobs
    entries = body["completion_probabilities"]
    assert len(entries) == 4
    logprobs = (await complete(served, n_probs=2, n_predict=4)).json()["completion_probabilities"]
    assert not served.engine.requests[-1].params.final_logprobs
    for entry, other in zip(entries, logprobs, strict=True):
        assert entry.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        assert entry["prob"] == pytest.approx(math.exp(other["logprob"]))
        for top, logprob in zip(entry["top_probs"], other["top_logprobs"], strict=True):
            assert top["prob"] == pytest.approx(math.exp(logprob["logprob"]))


async def test_completion_response_fields_select_by_path(served: Served) -> None:
    wanted = ["content", "generation_settings/n_predict", "absent/x"]
    body = (await complete(served, n_predict=2, response_fields=wanted)).json()
    assert body == {"content": "He", "generation_settings/n_predict": 2}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"7": 2.5, "ab": -1}, {7: 2.5, 64: -1.0, 65: -1.0}),
        ([[7, 2], ["ab", False]], {7: 2.0, 64: float("-inf"), 65: float("-inf")}),
        ([], {}),
    ],
)
async def test_completion_bias_names_tokens_or_texts(
    served: Served, given: Any, wanted: dict[int, float]
) -> None:
    await complete(served, logit_bias=given)
    assert dict(served.engine.requests[-1].params.logit_bias) == wanted


async def test_completion_ignore_eos_bans_the_end_token(served: Served) -> None:
    body = (await complete(served, ignore_eos=True)).json()
    assert dict(served.engine.requests[-1].params.logit_bias) == {EOS: float("-inf")}
    assert body["generation_settings"]["logit_bias"] == [{"token": EOS, "bias": None}]


async def test_completion_cache_prompt_false_shares_no_prefix(served: Served) -> None:
    await complete(served, cache_prompt=True, cache_salt="mine")
    await complete(served, cache_prompt=False)
    await complete(served, cache_prompt=False)
    first, second, third = [request.salt for request in served.engine.requests]
    assert first == "mine"
    assert len({first, second, third}) == 3


async def test_completion_grammars_reach_the_engine(served: Served) -> None:
    await complete(served, grammar='root ::= "a"')
    await complete(served, json_schema={"type": "integer"})
    assert all(request.params.grammar for request in served.engine.requests)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"t_max_predict_ms": 1.5}, "t_max_predict_ms"),
        ({"n_indent": 4}, "n_indent"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ({"repeat_last_n": 0, "presence_penalty": 0.5}, "repeat_last_n"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, None),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[999, 1]]}, "logit_bias"),
        ({"logit_bias": {"a": 101}}, "logit_bias"),
        ({"logit_bias": {"a": True}}, "logit_bias"),
        ({"logit_bias": "a"}, "logit_bias"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt.1"),
        ({"n_probs": 21}, "n_probs"),
        ({"grammar": "root ::= nothing"}, "grammar"),
    ],
)
async def test_completion_refuses_what_it_cannot_do(
    served: Served, fields: dict[str, Any], param: str | None
) -> None:
    response = await complete(served, **fields)
    if param is None:
        assert response.status_code == 200  # an empty schema is none
        return
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_completion_harmless_values_are_accepted_without_a_header(served: Served) -> None:
    fields = {"mirostat": 0, "repeat_last_n": 64, "typical_p": 1.0, "id_slot": 2, "n_keep": -1}
    response = await complete(served, **fields)
    assert response.status_code == 200
    assert "x-ignored-params" not in response.headers
    response = await complete(served, unknown=1)
    assert response.headers["x-ignored-params"] == "unknown"


async def test_infill_puts_the_prompt_behind_the_prefix(
    tmp_path: Path, says: Callable[[str], Script], encode: Encode
) -> None:
    folder = write_model(tmp_path / "coder")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([*FORMATS[0], "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    info = msgspec.structs.replace(INFO, vocab_size=262)
    fields = {"input_prefix": "de", "prompt": "f", "input_suffix": "return"}
    async with serving(FakeEngine(says("x"), info=info), folder) as coder:
        body = (await coder.http.post("/infill", json=fields)).json()
        assert body["content"] == "x"
        [request] = coder.engine.requests
        expected = [BOS, 258, *encode("def"), 259, *encode("return"), 260]
        assert request.prompt == expected
        assert request.params.stop_token_ids == (EOS, 261)
        extra = {"input_extra": [{"filename": "a", "text": "b"}]}
        refused = await coder.http.post("/infill", json=fields | extra)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_extra")


async def test_infill_of_a_model_without_its_tokens_is_refused(served: Served) -> None:
    fields = {"input_prefix": "a", "input_suffix": "b"}
    response = await served.http.post("/infill", json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_suffix"
