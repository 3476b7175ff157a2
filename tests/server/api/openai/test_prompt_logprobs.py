"""Prompt logprobs: `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.conftest import BOS, EOS
from tests.support.fake_engine import scores_of
from tests.support.rig import Served

TEXT = "Hello wörld!"


def joined(text: str) -> dict[str, Any]:
    """Return the single choice of a stream, with its deltas joined."""
    whole: dict[str, Any] = {"text": "", "logprobs": {}}
    for event in text.split("\n\n"):
        if not event.startswith("data: {"):
            continue
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
    return whole


async def test_completions_echo_with_logprobs_includes_prompt_logprobs(served: Served) -> None:
    fields: dict[str, Any] = {"prompt": "abö", "echo": True, "logprobs": 1}
    choice = (await served.complete(**fields)).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == "abö" + TEXT
    # "ö" is two tokens, each half a character. The special token at the start has no text.
    assert found["tokens"][:6] == ["<s>", "a", "b", "\ufffd", "\ufffd", "H"]
    assert found["token_logprobs"][:6] == [None, -1, -2, -3, -4, -0.5]
    assert found["top_logprobs"][:3] == [None, {"b": -0.25, "a": -1}, {"a": -0.25, "b": -2}]
    assert found["text_offset"][:9] == [0, 0, 1, 2, 2, 3, 4, 5, 6]
    assert len({len(values) for values in found.values()}) == 1
    streamed = joined((await served.complete(**fields, stream=True)).text)
    assert streamed == {name: choice[name] for name in streamed}


@pytest.mark.parametrize(
    ("prompt", "skip", "offsets"),
    [
        ("ab", True, [0, 0, 1, 2, 3]),
        ("ab", False, [0, 0, 1, 2, 3]),
        ("a</s>b", True, [0, 0, 1, 5, 6, 7]),
        ("a</s>b", False, [0, 0, 1, 5, 6, 7]),
        ([BOS, 64, EOS, 65], True, [0, 0, 1, 1, 2, 3]),
        ([BOS, 64, EOS, 65], False, [0, 3, 4, 8, 9, 10]),
    ],
)
async def test_text_offset_with_echo_is_position_in_text(
    served: Served, prompt: Any, skip: bool, offsets: list[int]
) -> None:
    """`offsets` are those of the prompt's tokens and of the answer's two tokens."""
    fields = {"prompt": prompt, "skip_special_tokens": skip, "max_tokens": 2}
    choice = (await served.complete(**fields, echo=True, logprobs=0)).json()["choices"][0]
    assert choice["logprobs"]["text_offset"] == offsets
    text = choice["text"]
    assert text.endswith("He")
    for token, start, end in zip(
        choice["logprobs"]["tokens"], offsets, [*offsets[1:], len(text)], strict=True
    ):
        assert text[start:end] in (token, "")


async def test_choices_of_one_prompt_share_prompt_logprobs(served: Served) -> None:
    """Prompt logprobs are computed once per prompt. A stream computes them for each choice, because
    it sends each choice as soon as it can."""
    fields: dict[str, Any] = {"prompt": [[64, 65], [66, 67]], "n": 2, "max_tokens": 1}
    fields |= {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
    body = (await served.complete(**fields)).json()
    found = [choice["logprobs"]["token_logprobs"][:2] for choice in body["choices"]]
    assert found == [[None, -1.0]] * 4
    keys = [sorted(choice["prompt_logprobs"][1]) for choice in body["choices"]]
    assert keys == [["64", "65"]] * 2 + [["66", "67"]] * 2
    wanted = [request.params.prompt_logprobs for request in served.engine.requests]
    assert wanted == [1, -1, 1, -1]
    del fields["prompt_logprobs"]
    await served.complete(**fields, stream=True)
    wanted = [request.params.prompt_logprobs for request in served.engine.requests[4:]]
    assert wanted == [1] * 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"echo": True, "logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 2, "n": 2}, "logprobs"),
    ],
)
async def test_prompt_logprobs_over_limit_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], named: str
) -> None:
    """Prompt logprobs are computed quickly, and each takes a kilobyte of memory."""
    monkeypatch.setattr("server.generation.limits.MAX_PROMPT_LOGPROBS", 29)
    error = (await served.complete(prompt=[64] * 5, **fields)).json()["error"]
    assert (error["param"], "log-probabilities" in error["message"]) == (named, True)
    assert (await served.complete(prompt=[64] * 4, logprobs=5)).status_code == 200


async def test_logprobs_of_several_choices_over_limit_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without streaming, all logprobs are kept until the end; a stream does not keep them."""
    monkeypatch.setattr("server.generation.limits.MAX_ANSWER_LOGPROBS", 23)
    fields = {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 2}
    error = (await served.complete(**fields)).json()["error"]
    assert error["param"] == "logprobs"
    assert (
        "4 choices of up to 2 tokens may have 24 log-probabilities, more than the 23"
        in (error["message"])
    )
    for more in ({"stream": True}, {"logprobs": 1}, {"n": 1}, {"max_tokens": 1}):
        assert (await served.complete(**fields | more)).status_code == 200
    alone = await served.complete(prompt="a", max_tokens=40, logprobs=2)
    assert alone.status_code == 200


async def test_echo_token_id_prompt_keeps_number_of_tokens(served: Served) -> None:
    """Evaluation harnesses rely on this: they count the tokens that they have sent."""
    for prompt in ([64, 65, 66], [[64, 65, 66], [BOS, 66]]):
        body = (await served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1)).json()
        prompts = prompt if isinstance(prompt[0], list) else [prompt]
        for choice, ids in zip(body["choices"], prompts, strict=True):
            found = choice["logprobs"]
            assert found["token_logprobs"][:-1] == [None, *(-1.0 - n for n in range(len(ids) - 1))]
            for logprob, top in zip(
                found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True
            ):
                assert logprob in top.values()


async def test_openai_client_max_tokens_0_with_echo_returns_prompt_logprobs(served: Served) -> None:
    answer = await served.openai.completions.create(
        model="tiny", prompt=[[64, 65], [66]], echo=True, logprobs=0, max_tokens=0
    )
    assert [c.text for c in answer.choices] == ["ab", "c"]
    assert [c.finish_reason for c in answer.choices] == ["length", "length"]
    assert [c.logprobs.token_logprobs for c in answer.choices] == [[None, -1.0], [None]]
    assert answer.choices[0].logprobs.top_logprobs == [None, {"b": -1.0}]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert await served.metric("generation_tokens_total") == 0


async def test_completions_max_tokens_0_returns_no_generated_token(served: Served) -> None:
    fields: dict[str, Any] = {"prompt": [64, 65], "max_tokens": 0, "return_token_ids": True}
    choice = (await served.complete(**fields, echo=True)).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("ab", [])
    assert choice["prompt_token_ids"] == [64, 65]
    choice = (await served.complete(**fields, prompt_logprobs=0)).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [])
    streamed = joined(
        (await served.complete(prompt="ab", max_tokens=0, echo=True, stream=True)).text
    )
    assert (streamed["text"], streamed["finish_reason"]) == ("ab", "length")
    served.engine.script = lambda request: [EOS]
    choice = (await served.complete(**fields, echo=True)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")


@pytest.mark.parametrize("chat", [False, True])
async def test_prompt_logprobs_have_vllm_format(served: Served, chat: bool) -> None:
    body = (await (served.chat if chat else served.complete)(prompt_logprobs=2)).json()
    found = (body if chat else body["choices"][0])["prompt_logprobs"]
    (request,) = served.engine.requests
    assert len(found) == len(request.prompt)
    assert found[0] is None
    for token, entries, score in zip(
        request.prompt[1:], found[1:], scores_of(request), strict=True
    ):
        own, other = entries[str(token)], entries[str(token ^ 1)]
        assert (own["logprob"], own["rank"]) == (score.logprob, 2)
        assert (other["logprob"], other["rank"]) == (-0.25, 1)
        assert isinstance(own["decoded_token"], str)
    assert "logprobs" not in str(body.get("usage"))


async def test_prompt_logprobs_token_outside_top_has_its_rank(served: Served) -> None:
    choice = (await served.complete(prompt=[64, 65], prompt_logprobs=1)).json()["choices"][0]
    own = {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    assert choice["prompt_logprobs"][1]["65"] == own
    assert choice["prompt_logprobs"][1]["64"]["rank"] == 1


async def test_logprobs_and_prompt_logprobs_have_their_own_counts(served: Served) -> None:
    fields: dict[str, Any] = {"prompt": [64, 65], "echo": True, "logprobs": 0}
    choice = (await served.complete(**fields, prompt_logprobs=3)).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -1.0}
    assert len(choice["prompt_logprobs"][1]) == 3
    assert choice["prompt_logprobs"][1]["65"]["rank"] == 2
    assert served.engine.requests[0].params.prompt_logprobs == 3
    assert choice["prompt_logprobs"][1]["200"]["logprob"] == -9999, "JSON has no infinity"
    fields = {"prompt": [64, 65], "logprobs": 0, "prompt_logprobs": 0}
    choice = (await served.complete(**fields)).json()["choices"][0]
    assert choice["logprobs"]["tokens"][0] == "H", "without echo, logprobs cover only the answer"
    choice = (await served.complete(prompt=[64, 65], logprobs=0)).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 13
    assert served.engine.requests[2].params.prompt_logprobs == -1


async def test_many_prompt_logprobs_are_formatted_in_a_thread(
    served: Served, monkeypatch: Any
) -> None:
    tokenizer, beside = served.app.state.penstock.tokenizer, set()
    text_of = tokenizer.token_text

    def spy(token: int) -> str:
        beside.add(threading.current_thread() is not threading.main_thread())
        return str(text_of(token))

    monkeypatch.setattr(tokenizer, "token_text", spy)
    few = {"prompt": [64] * 20, "echo": True, "logprobs": 1, "max_tokens": 2}
    for prompt, many in (([64] * 20, False), ([[64] * 400] * 4, True)):
        for stream in (False, True):
            beside.clear()
            await served.complete(**few | {"prompt": prompt, "stream": stream})
            assert many in beside
            assert stream or len(beside) == 1
