"""Error responses: they name the invalid field, have OpenAI's format, and precede any work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import RequestRejectedError
from server.api.anthropic.schemas import MessagesBody
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.completion import CompletionBody
from server.api.openai.schemas.embedding import EmbeddingBody, ScoreBody
from server.cli.lifetime import uvicorn_config
from server.http.errors import HTTP_CODES, UNAVAILABLE, VALIDATION_CODES, to_api_error
from server.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.rig import check_error_body, serving
from tests.support.thorough import examples
from tests.support.wings import absent_wings

USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
TOOL = {"type": "function", "function": {"name": "f"}}


BAD = "invalid_value"
UNSUPPORTED = "unsupported_parameter"
Cases = list[tuple[dict[str, Any], str, str]]
CHAT_CASES: Cases = [
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    ({"prompt_logprobs": 21}, "prompt_logprobs", BAD),
    ({"prompt_logprobs": -1}, "prompt_logprobs", BAD),
    ({"max_tokens": 0}, "max_tokens", BAD),
    ({"max_tokens": 0, "prompt_logprobs": 0}, "max_tokens", BAD),
    ({"length_penalty": True}, "length_penalty", UNSUPPORTED),
    ({"modalities": ["audio"]}, "modalities", UNSUPPORTED),
    ({"moderation": {"model": "x"}}, "moderation", UNSUPPORTED),
    ({"audio": {"voice": "x"}}, "audio", UNSUPPORTED),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", BAD),
    ({"functions": [{"name": "f"}], "tool_choice": "required"}, "tool_choice", BAD),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", BAD),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call", BAD),
    ({"function_call": {"name": "g"}}, "function_call", BAD),
    ({"chat_template": "{{ 1 }}"}, "chat_template", UNSUPPORTED),
    (
        {"messages": [USER, {"role": "user", "content": [IMAGE]}]},
        "messages",
        UNSUPPORTED,
    ),
    (
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs.tokenize",
        UNSUPPORTED,
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", UNSUPPORTED),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", BAD),
    ({"chat_template_kwargs": {"a": "x" * 20000}}, "chat_template_kwargs", BAD),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs", BAD),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", BAD),
    ({"messages": []}, "messages", BAD),
    ({"messages": "Hi"}, "messages", BAD),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", BAD),
    ({"messages": [{"role": "user"}]}, "messages.0.content", BAD),
    ({"messages": [{"role": "user", "tool_calls": [TOOL]}]}, "messages.0.content", BAD),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", BAD),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "missing_required_parameter",
    ),
    ({"top_logprobs": 2}, "top_logprobs", BAD),
    ({"logprobs": 2}, "logprobs", BAD),
    ({"logit_bias": {"258": 1}}, "logit_bias", BAD),
    ({"logit_bias": {"-1": 1}}, "logit_bias", BAD),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", BAD),
    ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", BAD),
    ({"logit_bias": {"+7": 1}}, "logit_bias", BAD),
    ({"min_tokens": 1, "stop_token_ids": [*range(258)]}, "stop_token_ids", BAD),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", BAD),
    ({"stop": ["a"] * 33}, "stop", BAD),
    ({"stop": ""}, "stop", BAD),
    ({"stop": ["a", 5]}, "stop.1", BAD),
    ({"stop_token_ids": [258]}, "stop_token_ids", BAD),
    ({"stop_token_ids": [1, 258, 2]}, "stop_token_ids", BAD),
    ({"stream": "yes"}, "stream", BAD),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", BAD),
    ({"stream_options": {"include_usage": True}}, "stream_options", BAD),
    ({"stream": False, "stream_options": {}}, "stream_options", BAD),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", BAD),
    ({"model": "gpt-4"}, "model", "model_not_found"),
    ({"model": "../../etc/passwd"}, "model", "model_not_found"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        BAD,
    ),
]
COMPLETION_CASES: Cases = [
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"suffix": 5}, "suffix", BAD),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", BAD),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", BAD),
    ({"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens", UNSUPPORTED),
    ({"best_of": 2, "stream": True}, "best_of", UNSUPPORTED),
    ({"best_of": 2, "n": 3}, "best_of", BAD),
    ({"best_of": 0}, "best_of", BAD),
    ({"best_of": 129}, "best_of", BAD),
    ({"prompt": ["a"] * 17, "best_of": 128}, "prompt", BAD),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", UNSUPPORTED),
    ({"max_tokens": 0}, "max_tokens", BAD),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens", BAD),
    ({"max_tokens": -1, "echo": True}, "max_tokens", BAD),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", BAD),
    ({"max_tokens": 0, "echo": True, "prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    ({"echo": True, "logprobs": 5, "prompt": [[1] * 500] * 64, "n": 2}, "logprobs", BAD),
    ({"prompt_logprobs": 20, "prompt": [[1] * 500] * 25}, "prompt_logprobs", BAD),
    (
        {"prompt_logprobs": 0, "echo": True, "logprobs": 5, "prompt": [[1] * 500] * 64, "n": 2},
        "logprobs",
        BAD,
    ),
    ({"prompt_logprobs": 20, "prompt": "a" * 60000}, "prompt", "context_length_exceeded"),
    ({"prompt_logprobs": True}, "prompt_logprobs", BAD),
    ({"logprobs": 21}, "logprobs", BAD),
    ({"prompt": None}, "prompt", BAD),
    ({"prompt": []}, "prompt", BAD),
    ({"prompt": [[]]}, "prompt.0", BAD),
    ({"prompt": [1, "a"]}, "prompt.1", BAD),
    ({"prompt": ["a", 1]}, "prompt.1", BAD),
    ({"prompt": [258]}, "prompt", BAD),
    ({"prompt": [1, 258, 2]}, "prompt", BAD),
    ({"prompt": [[1], [2, 258]]}, "prompt", BAD),
    ({"prompt": [-1]}, "prompt.0", BAD),
    ({"prompt": ["a"] * 2049}, "prompt", BAD),
    ({"prompt": ["a"] * 17, "n": 128}, "prompt", BAD),
    ({"prompt": "a" * 511}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 512}, "prompt", "context_length_exceeded"),
    ({"prompt": ["a", "a" * 600]}, "prompt", "context_length_exceeded"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", BAD),
]


async def test_invalid_chat_request_names_field_and_code(served):
    for fields, param, code in CHAT_CASES:
        response = await served.chat(**fields)
        assert response.status_code == (404 if code == "model_not_found" else 400), fields
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code), fields
        assert param in error["message"] or code == "context_length_exceeded", fields
    assert not served.engine.requests


async def test_unsupported_field_message_lists_accepted_values_or_hint(served):
    says = {"modalities": 'values: ["text"].', "audio": "not supported by this server."}
    for field, instead in says.items():
        response = await served.chat(**{field: {"type": "audio"}})
        assert response.json()["error"]["message"].endswith(instead)


async def test_invalid_completion_request_names_field_and_code(served):
    for fields, param, code in COMPLETION_CASES:
        response = await served.complete(**fields)
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code), fields
        assert param in error["message"] or code == "context_length_exceeded", fields
    assert not served.engine.requests


@pytest.mark.parametrize("chat", [True, False])
async def test_very_long_prompt_is_refused_without_tokenizing_all_of_it(served, monkeypatch, chat):
    read, encode = [], Tokenizer.encode

    def spy(self, text, **options):
        read.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    monkeypatch.setattr("server.text.tokenizer.BEGINNING", 9000)
    text = "a" * 100_000
    fields = {"messages": [{**USER, "content": text}]} if chat else {"prompt": ["a", text]}
    response = await (served.chat(**fields) if chat else served.complete(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if chat else "prompt")
    assert error["message"].startswith("This model's maximum context length is 512 tokens, ")
    assert re.search(r"512 tokens, .* alone has \d{4} in its first 9000 char", error["message"])
    assert max(read) == 9000
    told = (await served.http.post("/tokenize", json={"prompt": text})).json()
    assert told["count"] >= 100_000, "/tokenize must count all tokens"


TOLD = [
    (ChatBody, {"stop": [1]}, "a string or a list of strings, not a list that begins with 1"),
    (
        ChatBody,
        {"stop": [[1]]},
        "a string or a list of strings, not a list that begins with a list",
    ),
    (ChatBody, {"messages": [{**USER, "content": [1]}]}, "a string or a list of parts, not a"),
    (ChatBody, {"messages": [7]}, "messages.0: Input should be an object, not 7."),
    (ChatBody, {"logit_bias": []}, "an object, not a list."),
    (ChatBody, {"stream": "secret"}, "boolean, not a string."),
    (ChatBody, {"n": 129}, "less than or equal to 128, not 129."),
    (ChatBody, {"n": {"a": "secret"}}, "integer, not an object."),
    (ScoreBody, {"text_1": [[1]], "text_2": "a"}, "text_1: Input should be a string or a list of"),
]


@pytest.mark.parametrize(("kind", "fields", "words"), TOLD)
def test_validation_message_describes_value_in_json_terms(kind, fields, words):
    base = {"messages": [USER]} if kind is ChatBody else {}
    with pytest.raises(ValueError, match="error") as caught:
        kind.model_validate(base | fields)
    assert words in to_api_error(caught.value).message


async def test_max_tokens_beyond_the_context_is_lowered_and_named(served):
    """Coding agents ask for 32,000 tokens by rote."""
    answer = await served.complete(prompt="a" * 500, max_tokens=11)
    assert answer.status_code == 200
    assert "x-adjusted-params" not in answer.headers
    for more in ({}, {"stream": True}):
        answer = await served.complete(prompt=["a" * 500, "a" * 505], max_tokens=32_000, **more)
        assert answer.status_code == 200
        assert answer.headers["x-adjusted-params"] == "max_tokens=11"
        assert [r.params.max_tokens for r in served.engine.requests[-2:]] == [11, 6]


async def test_strict_max_tokens_refuses_what_does_not_fit(model, says):
    async with serving(FakeEngine(says("x")), model, strict_max_tokens=True) as served:
        assert (await served.complete(prompt="a" * 500, max_tokens=11)).status_code == 200
        answer = await served.complete(prompt="a" * 500, max_tokens=12)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert all(number in error["message"] for number in ("512", "501", "513"))


BOUNDS = {
    "n": (1, 128),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "seed": (-(2**63), 2**63),
    "max_tokens": (1, 2**31 - 1),
    "max_completion_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "priority": (-(2**31) + 1, 2**31 - 1),
    "top_logprobs": (0, 20),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_number_outside_its_bounds_is_rejected(name):
    low, high = BOUNDS[name]
    base = {"messages": [USER], "logprobs": True}
    for value in (low, high):
        ChatBody.model_validate({**base, name: value})
    for value in (low - 1, high + 1, -(2**64), 2**64, float("nan"), float("inf"), "1", True, [1]):
        with pytest.raises(ValueError, match=name):
            ChatBody.model_validate({**base, name: value})


CALLS = {"role": "assistant", "tool_calls": [TOOL] * 128}
# (body type, value at its limit, value beyond its limit)
LIMITS = [
    (ChatBody, {"stop": "a" * 4096}, {"stop": "a" * 4097}),
    (ChatBody, {"stop": ["a"] * 32}, {"stop": ["a"] * 33}),
    (ChatBody, {"stop_token_ids": [0] * 1024}, {"stop_token_ids": [0] * 1025}),
    (ChatBody, {"stop_token_ids": [2**31 - 1]}, {"stop_token_ids": [2**31]}),
    (ChatBody, {"stop_token_ids": [0]}, {"stop_token_ids": [0, -1]}),
    (ChatBody, {"bad_words": ["a" * 64]}, {"bad_words": ["a" * 65]}),
    (ChatBody, {"bad_words": ["a"] * 128}, {"bad_words": ["a"] * 129}),
    (ChatBody, {"bad_words": ["a"]}, {"bad_words": [""]}),
    (ChatBody, {"logit_bias": {"1": -100}}, {"logit_bias": {"1": -100.1}}),
    (ChatBody, {"logit_bias": {"1": 100}}, {"logit_bias": {"1": 100.1}}),
    (ChatBody, {"cache_salt": "a" * 256}, {"cache_salt": "a" * 257}),
    (ChatBody, {"reasoning_effort": "a" * 32}, {"reasoning_effort": "a" * 33}),
    (ChatBody, {"messages": [USER] * 4096}, {"messages": [USER] * 4097}),
    (ChatBody, {"messages": [CALLS]}, {"messages": [{**CALLS, "tool_calls": [TOOL] * 129}]}),
    (CompletionBody, {"logprobs": 0}, {"logprobs": -1}),
    (CompletionBody, {"logprobs": 20}, {"logprobs": 21}),
    (CompletionBody, {"prompt": ["a"] * 2048}, {"prompt": ["a"] * 2049}),
    (CompletionBody, {"prompt": [[1]] * 2048}, {"prompt": [[1]] * 2049}),
    (EmbeddingBody, {"input": ["a"] * 2048}, {"input": ["a"] * 2049}),
    (EmbeddingBody, {"input": [[1]] * 2048}, {"input": [[1]] * 2049}),
    (EmbeddingBody, {"input": "a"}, {"input": ""}),
    (EmbeddingBody, {"dimensions": 1}, {"dimensions": 0}),
    (EmbeddingBody, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -2}),
    (EmbeddingBody, {"priority": 2**31 - 1}, {"priority": 2**31}),
    (EmbeddingBody, {"priority": -(2**31) + 1}, {"priority": -(2**31)}),
]


@pytest.mark.parametrize(("kind", "most", "more"), LIMITS, ids=lambda value: str(value)[:40])
def test_text_or_list_beyond_its_limit_is_rejected(kind, most, more):
    base = {"messages": [USER], "prompt": "a", "input": "a"}
    fields = kind.model_fields
    base = {n: v for n, v in base.items() if n in fields and fields[n].is_required()}
    kind.model_validate(base | most)
    with pytest.raises(ValueError, match=next(iter(more))):
        kind.model_validate(base | more)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([ChatBody, CompletionBody, MessagesBody]), st.data())
def test_random_field_values_are_valid_or_become_400(kind, data):
    names = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), max_size=3))
    body = {"messages": [USER], "prompt": "x", "max_tokens": 3} | {
        name: data.draw(JSON) for name in names
    }
    try:
        kind.model_validate(body)
    except Exception as error:
        answer = to_api_error(error)
        assert answer.status == 400
        assert not re.search(r"dictionary|instance of|_shape", answer.message)
        check_error_body(json.loads(answer.body("r")), 400)


HUGE = b"9" * 5000


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e400}',
    b'{"prompt": "x", "seed": ' + HUGE + b"}",
    b'{"prompt": "x", "seed": 18446744073709551616}',
    b"[" * 100_000,
    b'{"prompt":' + b'{"a":' * 900 + b"1" + b"}" * 901,
]


async def test_malformed_body_returns_400(served):
    headers = {"content-type": "application/json"}
    for body in MALFORMED:
        for path in ("/v1/completions", "/v1/chat/completions", "/detokenize"):
            response = await served.http.post(path, content=body, headers=headers)
            assert response.status_code == 400, body[:80]
    assert not served.engine.requests


async def test_stop_token_ids_that_leave_one_token_are_accepted(served):
    stops = {"stop_token_ids": [*range(1, 258)], "min_tokens": 1}
    assert (await served.complete(prompt="a", **stops)).status_code == 200
    assert (await served.complete(prompt="a", stop_token_ids=[*range(258)])).status_code == 200


async def test_nul_character_and_duplicate_json_keys_are_accepted(served):
    assert (await served.complete(prompt="a\0b")).status_code == 200
    raw = b'{"prompt":"x","n":99,"n":2}'
    headers = {"content-type": "application/json"}
    response = await served.http.post("/v1/completions", content=raw, headers=headers)
    assert len(response.json()["choices"]) == 2


async def test_http_level_errors_have_expected_status_and_code(served):
    http = served.http
    for path in ("/v1", "/v1/chat/completions/", "/v1/images", "/%2e%2e/x", "/redoc"):
        for response in (await http.get(path), await http.post(path, content=b"x")):
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    allowed = {
        "/v1/chat/completions": "POST",
        "/v1/responses/resp_1": "DELETE, GET, HEAD",
    }
    for path, methods in allowed.items():
        response = await http.put(path)
        assert (response.status_code, response.headers["allow"]) == (405, methods), path
        assert response.json()["error"]["code"] == "method_not_allowed"
    response = await http.post(
        "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (
        415,
        "unsupported_media_type",
    )
    response = await http.get("/v1/models", headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_host")
    assert "--host" in response.json()["error"]["message"]
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_compressed_body_returns_415(served):
    kind = {"content-type": "application/json"}
    for coding, status in (("gzip", 415), ("br, Zstd", 415), ("identity", 400), ("", 400)):
        headers = {**kind, "content-encoding": coding}
        response = await served.http.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
        assert response.status_code == status
        if status == 415:
            assert f"Content-Encoding: {coding.lower()}" in response.json()["error"]["message"]
            assert response.headers["accept-encoding"] == "identity"


async def test_server_bound_to_network_accepts_any_host_header(model, says):
    async with serving(FakeEngine(says("x")), model, host="0.0.0.0") as served:
        response = await served.http.get("/v1/models", headers={"host": "model.example"})
        assert response.status_code == 200


async def test_body_over_max_body_bytes_returns_413(model, says):
    async with serving(FakeEngine(says("x")), model, max_body_bytes=2000) as served:
        response = await served.complete(prompt="a" * 2000)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert response.headers["connection"] == "close"
        headers = {"content-type": "application/json"}

        async def chunks(count: int):
            for sent in range(count):
                seen.append(sent)
                yield b" " * 500

        seen: list[int] = []
        response = await served.http.post("/v1/completions", content=chunks(6), headers=headers)
        assert response.status_code == 413
        with contextlib.suppress(httpx2.NetworkError):  # closed while sending
            await served.http.post("/v1/completions", content=chunks(10**6), headers=headers)
        assert len(seen) < 10**5
        assert await served.metric("rejects_total", code="request_too_large") == 3


async def test_incomplete_body_returns_408_after_deadline(served, monkeypatch):
    monkeypatch.setattr("server.http.body.BODY_DEADLINE", 0.1)
    monkeypatch.setattr("server.http.boundary.LINGER", 0.1)
    reader, writer = await asyncio.open_connection(*served.address)
    head = "content-type: application/json\r\ncontent-length: 10\r\n"
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n{{".encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer, "otherwise the read would not have ended"
    writer.close()


async def test_response_has_no_server_header_and_proxy_headers_are_ignored(served):
    """X-Forwarded-For is not trusted, so `proxy_headers` is off."""
    answer = await served.http.get("/health", headers={"x-forwarded-for": "192.0.2.1"})
    assert "server" not in answer.headers
    config = uvicorn_config(served.app)
    assert (config.proxy_headers, config.timeout_keep_alive) == (False, 75)


async def test_rejection_of_a_grammar_names_its_field_and_an_overload_is_503(served):
    served.engine.reject = RequestRejectedError("invalid_grammar", "no", "guided_json")
    error = (await served.chat(stream=True)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_grammar", "guided_json")
    served.engine.reject = RequestRejectedError("server_overloaded", "later", "guided_json")
    answer = await served.chat(stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


def test_every_error_code_is_in_docs_errors_md():
    text = "".join(path.read_text() for path in Path("server").rglob("*.py"))
    written = re.findall(r'ApiError\(\s*\d+,\s*"([a-z_]+)"|invalid\(.*, "([a-z_]+)"\)', text)
    tables = [*VALIDATION_CODES.values(), *HTTP_CODES.values()]
    codes = {*map("".join, written), *tables, *(code for code, _, _ in UNAVAILABLE.values())}
    assert {"invalid_json", "server_overloaded", "numerical_error", "not_allowed"} <= codes
    page = Path("docs/errors.md").read_text()
    table = page[page.index("## Codes") : page.index("## When a stream fails")]
    columns = [line.split("|")[2] for line in table.splitlines() if line[:3] in ("| 4", "| 5")]
    named = {code for column in columns for code in re.findall(r"`([a-z_]+)`", column)}
    of_engine = {"context_length_exceeded", "adapter_unavailable"}
    known = codes | of_engine | {"invalid_value"}
    assert known <= named
    assert named == known or absent_wings()
