"""Chat completions without streaming: the answers, and the requests that reach the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.protocol.generate import SamplingParams
from tests.server.conftest import BOS, EOS
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, serving

USER = {"role": "user", "content": "Hi"}


async def prompt_of(served: Served, **fields: Any) -> str:
    response = await served.chat(**fields)
    assert response.status_code == 200, response.text
    ids = served.engine.requests[-1].prompt
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    return served.app.state.penstock.tokenizer.decode(ids[1:])


async def params_of(served: Served, **fields: Any) -> SamplingParams:
    response = await served.chat(**fields)
    assert response.status_code == 200, response.text
    return served.engine.requests[-1].params


async def test_chat_openai_client_receives_complete_answer(served):
    answer = await served.openai.chat.completions.create(model="tiny", messages=[USER])
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello wörld!")
    assert choice.logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage.completion_tokens == 14  # 13 bytes and EOS
    assert answer.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 14
    assert answer._request_id.startswith("req_")


async def test_chat_defaults_come_from_checkpoint_then_from_openai(served):
    params = await params_of(served)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 1.0, 0.1)
    assert params.max_tokens == 512 - len(served.engine.requests[-1].prompt)
    assert params.stop_token_ids == (EOS,)
    assert params.logprobs == -1
    assert (await params_of(served, temperature=None, top_k=-1)).temperature == 0.6
    assert (await params_of(served, top_k=-1)).top_k == 0
    assert (await params_of(served, min_p=0)).min_p == 0


async def test_chat_every_parameter_reaches_the_engine(served):
    fields = {
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "logit_bias": {"65": 100, "66": -1.5},
        "seed": -5,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "priority": -3,
        "cache_salt": "tenant",
    }
    params = await params_of(served, **fields)
    assert params == SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((65, 100.0), (66, -1.5)),
        seed=-5,
        min_tokens=2,
        stop_token_ids=(7,),
        logprobs=2,
    )
    request = served.engine.requests[-1]
    assert (request.priority, request.salt) == (-3, "tenant")


async def test_chat_top_p_0_is_greedy(served):
    params = await params_of(served, top_p=0)
    assert (params.top_k, params.top_p) == (1, 1.0)


async def test_chat_choices_have_different_seeds(served):
    response = await served.chat(n=3, seed=2**63 - 2)
    seeds = [request.params.seed for request in served.engine.requests]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    await served.chat()
    await served.chat()
    assert len({request.params.seed for request in served.engine.requests}) == 5


async def test_chat_seed_minus_one_is_random(served):
    seeds = [(await params_of(served, seed=-1)).seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert min(seeds) >= 0


async def test_chat_prompt_is_rendered_once_and_has_one_bos(served):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert (
        await prompt_of(served, messages=messages) == "<system>Be brief.\n<user>a\nb\n<assistant>"
    )


async def test_chat_template_without_bos_gives_prompt_without_bos(model, tmp_path, says):
    (tmp_path / "bare.jinja").write_text("{{ messages[0].content }}")
    async with serving(
        FakeEngine(says("x")), model, chat_template=str(tmp_path / "bare.jinja")
    ) as served:
        await served.chat()
        assert BOS not in served.engine.requests[0].prompt


async def test_chat_tool_history_reaches_the_template(served):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    prompt = await prompt_of(served, messages=messages)
    assert '"arguments": {"x": 1}' in prompt
    assert "<tool>2" in prompt


async def test_chat_messages_of_the_api_before_tools_are_read_as_calls(served):
    called = {"name": "f", "arguments": '{"x":1}'}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "f", "content": "2"},
    ]
    prompt = await prompt_of(served, messages=messages)
    assert '"arguments": {"x": 1}' in prompt
    assert "<tool>2" in prompt


@pytest.mark.parametrize("silent", [{}, {"content": None}, {"content": ""}, {"content": []}])
async def test_chat_assistant_may_have_said_nothing(served, silent):
    messages = [USER, {"role": "assistant", **silent}, USER]
    assert "<assistant>\n" in await prompt_of(served, messages=messages)


async def test_chat_refusal_is_text_of_the_assistant(served):
    parts = [{"type": "text", "text": "I"}, {"type": "refusal", "refusal": "will not"}]
    messages = [USER, {"role": "assistant", "content": parts}, USER]
    assert "<assistant>I\nwill not\n" in await prompt_of(served, messages=messages)


async def test_chat_template_arguments_may_be_any_json(model, tmp_path, says):
    path = tmp_path / "all.jinja"
    path.write_text("{{ bos_token }}{{ mode }} {{ options.depth }} {{ messages[0].content }}")
    arguments = {"mode": "fast", "options": {"depth": [1, 2]}, "unread": 1, "null": None}
    async with serving(FakeEngine(says("x")), model, chat_template=str(path)) as served:
        answer = await served.chat(chat_template_kwargs=arguments)
        assert answer.headers["x-ignored-params"] == "unread"
        prompt = await prompt_of(served, chat_template_kwargs=arguments)
    assert prompt.startswith("fast [1, 2] ")


async def test_chat_every_known_message_field_reaches_the_template(model, tmp_path, says):
    fields = ("role", "name", "tool_call_id", "reasoning_content")
    shown = "/".join(f"{{{{ m.{name} }}}}" for name in fields)
    path = tmp_path / "all.jinja"
    path.write_text(f"{{{{ bos_token }}}}{{% for m in messages %}}{shown} {{% endfor %}}")
    messages = [
        {**USER, "name": "ann"},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    async with serving(FakeEngine(says("x")), model, chat_template=str(path)) as served:
        prompt = await prompt_of(served, messages=messages)
    assert prompt == "user/ann// assistant///why tool//c1/ "


async def test_chat_continue_final_message_ends_prompt_inside_it(served):
    assert await prompt_of(served, add_generation_prompt=False) == "<user>Hi\n"
    begun = [USER, {"role": "assistant", "content": [{"type": "text", "text": " Well, "}]}]
    for more in ({}, {"add_generation_prompt": False}):
        prompt = await prompt_of(served, messages=begun, continue_final_message=True, **more)
        assert prompt == "<user>Hi\n<assistant> Well, "
    fields = {"messages": begun, "continue_final_message": True}
    ids = (await served.http.post("/tokenize", json=fields)).json()["tokens"]
    assert ids == served.engine.requests[-1].prompt


async def test_chat_message_that_cannot_be_continued_returns_400(model, tmp_path, says):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": "x", "tool_calls": [call]}
    thought = {"role": "assistant", "content": "<think>a</think>b"}
    last = "{{ messages[-1].content"
    for source, message, why in (
        (f"{last} }}}}", called, "text content and no tool_calls"),
        ("{{ messages[0].content }}", thought, "does not render its content"),
        (f"{last}.split('</think>')[-1] }}}}", thought, "does not render its content"),
        (f"{last} }}}}{last} }}}}", thought, "does not render its content"),
    ):
        (tmp_path / "own.jinja").write_text(source)
        async with serving(
            FakeEngine(says("x")), model, chat_template=str(tmp_path / "own.jinja")
        ) as served:
            response = await served.chat(messages=[USER, message], continue_final_message=True)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
            assert why in response.json()["error"]["message"]
            fields = {"prompt": "x", "continue_final_message": True}
            refused = await served.http.post("/tokenize", json=fields)
            assert refused.json()["error"]["param"] == "continue_final_message"


async def test_chat_template_kwargs_reach_template_or_are_listed_as_ignored(served):
    prompt = await prompt_of(served, chat_template_kwargs={"enable_thinking": True})
    assert prompt.endswith("<think>")
    response = await served.chat(chat_template_kwargs={"reasoning_effort": "high"})
    assert response.headers["x-ignored-params"] == "reasoning_effort"


async def test_chat_ignored_header_lists_unknown_fields_only(served):
    response = await served.chat(user="u", store=True, metadata={"a": "b"}, foo=1, **{"b\r\nar": 2})
    assert response.headers["x-ignored-params"] == "foo, b__ar"
    assert "x-ignored-params" not in (await served.chat(user="u")).headers
    nameless = await served.chat(**{"": 1})  # a header may not end in a space
    assert nameless.headers["x-ignored-params"] == "_"
    brief = await served.chat(verbosity="low")
    assert brief.headers["x-ignored-params"] == "verbosity", "it would change the answer"


async def test_chat_ignored_header_lists_unknown_nested_members(served):
    parts = [{"type": "text", "text": "a", "cache_control": {}}] * 2
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "b", "refusal": None, "annotations": []},
    ]
    options = {"include_usage": True, "include_obfuscation": True}
    response = await served.chat(stream=True, stream_options=options, messages=messages)
    named = response.headers["x-ignored-params"].split(", ")
    assert named == [
        "stream_options.include_obfuscation",
        "messages.content.cache_control",
        "messages.annotations",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"prompt_logprobs": False, "length_penalty": 1.0, "typical_p": 1},
        {"stream_options": None},
        {"stop": []},
        {"n": 16},
        {"logit_bias": {}},
        {"model": None},
        {"top_logprobs": 0},
    ],
)
async def test_chat_values_without_effect_are_accepted(served, fields):
    assert (await served.chat(**fields)).status_code == 200


async def test_chat_logprobs_have_bytes_and_top_logprobs(served):
    answer = await served.openai.chat.completions.create(
        model="tiny", messages=[USER], logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == "Hello wörld!"
    assert content[0].token == "H"
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.5, -9999.0]
    answer = await served.openai.chat.completions.create(
        model="tiny", messages=[USER], logprobs=True
    )
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


async def test_chat_return_token_ids_returns_prompt_and_answer_ids(served, encode):
    body = (await served.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == served.engine.requests[0].prompt
    assert body["choices"][0]["token_ids"] == [*encode("Hello wörld!"), EOS]


async def test_chat_include_stop_str_shows_end_token(served):
    body = (await served.chat(include_stop_str_in_output=True, skip_special_tokens=False)).json()
    assert body["choices"][0]["message"]["content"] == "Hello wörld!</s>"


async def test_chat_max_tokens_inside_character_ends_with_replacement(served):
    body = (await served.chat(max_tokens=8)).json()
    assert body["choices"][0]["message"]["content"] == "Hello w\ufffd"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8


async def test_usage_cached_tokens_count_each_prompt_once(served):
    served.engine.cached_tokens = 16
    usage = (await served.chat(n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    usage = (await served.complete(prompt=["a", "b"], n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_chat_model_without_template_returns_400(model, tmp_path, says):
    for file in model.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("chat_template", "other"))
    async with serving(FakeEngine(says("x")), tmp_path) as served:
        response = await served.chat(model=None)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


CALL = {"type": "function", "function": {"name": "f", "arguments": "x" * 9000}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a" * 9000},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "a", "reasoning_content": "a" * 9000},
    ],
)
async def test_chat_messages_are_rendered_in_a_thread_and_long_ones_tokenised_there(
    served, monkeypatch, message
):
    beside = spied_threads(served, monkeypatch)
    await served.chat(messages=[message])
    assert beside["render"] == [True]
    # The template of these tests renders no reasoning, so the prompt is short in that case.
    assert beside["encode"] == ["reasoning_content" not in message]
    await served.chat()
    assert beside["render"] == [True, True]
    assert beside["encode"][1:] == [False]


async def test_completions_long_prompt_is_tokenised_in_a_thread(served, monkeypatch):
    beside = spied_threads(served, monkeypatch)
    await served.complete(prompt="a" * 9000)
    await served.complete(prompt="a")
    assert beside["encode"] == [True, False]
    await served.complete(prompt=[64] * 9000, echo=True)
    assert beside["decode"] == [True]


def spied_threads(served, monkeypatch) -> dict[str, list[bool]]:
    """Record for each call of `render`, `encode` and `decode` whether it runs in a thread other
    than the event loop's."""
    service, beside = served.app.state.penstock, {"render": [], "encode": [], "decode": []}

    def spy(owner, name):
        work = getattr(owner, name)

        def call(*args, **kwargs):
            beside[name].append(threading.current_thread() is not threading.main_thread())
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    spy(service.template, "render")
    spy(service.tokenizer, "encode")
    spy(service.tokenizer, "decode")
    return beside
