"""The official openai client with a real server: the results it parses and the errors it raises."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from engine.checkpoint.folder import model_folder
from engine.config import DEMO_MODEL
from tests.support.serve import Case, Server, serving

KEY = "sk-of-the-test"
# The story model has no chat template. With this one, it continues the text of the messages.
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
MOST = 12  # tokens of an answer


@dataclass(frozen=True)
class Tale:
    """A prompt, its greedy answer and the chat that asks for it."""

    case: Case
    told: str  # the text of the first MOST tokens
    chat: dict[str, Any]


@pytest.fixture(scope="module")
def tale(llama: Path, stories: list[Case]) -> Tale:
    case, tokenizer = stories[-1], Tokenizer.from_file(str(llama / "tokenizer.json"))
    whole = tokenizer.decode(case.prompt_ids + case.ids[:MOST])
    messages = [{"role": "user", "content": case.prompt}]
    chat = {"model": "tale", "messages": messages, "temperature": 0, "max_tokens": MOST}
    return Tale(case, whole.removeprefix(case.prompt), chat)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ("--served-model-name", "tale", "--chat-template", template, "--dtype", "float32")
    with serving(llama, *flags, env={"PENSTOCK_API_KEY": KEY}) as server:
        yield server


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def sdk_async(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as sdk:
        yield sdk


def test_chat_whole_and_streamed_are_equal(sdk: openai.OpenAI, tale: Tale) -> None:
    whole = sdk.chat.completions.create(**tale.chat)
    assert whole.object == "chat.completion"
    assert whole.model == "tale"
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tale.told
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tale.case.prompt_ids)
    assert whole.usage.completion_tokens == MOST
    assert whole.usage.total_tokens == len(tale.case.prompt_ids) + MOST

    chunks = list(
        sdk.chat.completions.create(
            **tale.chat, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == tale.told
    assert [p.choices[0].finish_reason for p in parts if p.choices[0].finish_reason] == ["length"]
    assert {part.usage for part in parts} == {None}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


async def test_async_chat_with_stop_equals_the_stream_helper(
    sdk_async: openai.AsyncOpenAI, tale: Tale
) -> None:
    stop = tale.told[9:14]
    fields = tale.chat | {"stop": stop}
    whole = await sdk_async.chat.completions.create(**fields)
    async with sdk_async.chat.completions.stream(**fields) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    for choice in (whole.choices[0], final.choices[0]):
        assert choice.message.content == "".join(deltas) == tale.told.partition(stop)[0]
        assert choice.finish_reason == "stop"


def test_completion_whole_and_streamed_equal_the_reference(sdk: openai.OpenAI, tale: Tale) -> None:
    fields: dict[str, Any] = {"model": "tale", "prompt": tale.case.prompt, "temperature": 0}
    whole = sdk.completions.create(**fields, max_tokens=MOST, logprobs=1)
    assert whole.choices[0].text == tale.told
    scores = whole.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs == pytest.approx(tale.case.logprobs[:12], abs=1e-3)
    chunks = sdk.completions.create(**fields, max_tokens=MOST, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == tale.told


def test_completion_with_echo_and_no_new_tokens_returns_prompt_logprobs(
    sdk: openai.OpenAI, tale: Tale
) -> None:
    """The prompt is text that the model generated, followed by one token that it did not."""
    case = tale.case
    given = [*case.after(30).prompt_ids, 0]
    whole = sdk.completions.create(
        model="tale", prompt=[given, given[:1]], echo=True, logprobs=1, max_tokens=0
    )
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(given) + 1, 0)
    scores, only = (choice.logprobs for choice in whole.choices)
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert scores.token_logprobs[-31:-1] == pytest.approx(case.logprobs[:30], abs=1e-3)
    greedy = [
        top is not None and logprob == max(top.values())
        for logprob, top in zip(scores.token_logprobs, scores.top_logprobs, strict=True)
    ]
    assert greedy[-31:] == [True] * 30 + [False]
    assert only is not None
    assert only.token_logprobs == [None]


def test_chat_with_seed_and_two_choices_is_repeatable(sdk: openai.OpenAI, tale: Tale) -> None:
    fields = tale.chat | {"temperature": 1, "n": 2, "seed": 5}
    first = [c.message.content for c in sdk.chat.completions.create(**fields).choices]
    assert len(set(first)) == 2
    streamed = ["", ""]
    for chunk in sdk.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_stop_string_ends_before_it(sdk: openai.OpenAI, stream: bool, tale: Tale) -> None:
    # Several tokens. The text of the first ones is held back until the last decides.
    stop = tale.told[8:22]
    answer: Any = sdk.chat.completions.create(**tale.chat, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    texts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
    assert "".join(texts) == tale.told.partition(stop)[0]
    assert choices[-1].finish_reason == "stop"


def test_chat_with_logprobs_equals_the_reference(sdk: openai.OpenAI, tale: Tale) -> None:
    answer = sdk.chat.completions.create(**tale.chat, logprobs=True, top_logprobs=3)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    logprobs = [token.logprob for token in scores.content]
    assert logprobs == pytest.approx(tale.case.logprobs[:12], abs=1e-3)
    for token in scores.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy selects the most likely token"
    spelt = b"".join(bytes(token.bytes or ()) for token in scores.content).decode()
    assert spelt == tale.told


def test_models_lists_the_served_name(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tale"]
    assert sdk.models.retrieve("tale").object == "model"


def test_errors_raise_typed_exceptions(server: Server, sdk: openai.OpenAI, tale: Tale) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(**tale.chat | {"model": "tales"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(**tale.chat | {"temperature": 3})
    assert bad.value.param == "temperature"
    messages = [{"role": "user", "content": "Once upon a time " * 200}]
    with pytest.raises(openai.BadRequestError) as long:
        sdk.chat.completions.create(**tale.chat | {"messages": messages})
    assert long.value.code == "context_length_exceeded"
    assert "512 tokens" in long.value.message
    stranger = sdk.with_options(api_key="sk-of-another")
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.chat.completions.create(**tale.chat, stream=True)
    assert refused.value.code == "invalid_api_key"
    assert KEY not in server.log


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    if not (model_folder(DEMO_MODEL) / "model.safetensors").is_file():
        pytest.skip("the demo model has no weights yet")
    with serving(DEMO_MODEL) as server:
        yield server


def test_demo_model_knows_the_capital_of_france(demo: Server) -> None:
    fields: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="-", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(**fields)
        chunks = list(sdk.chat.completions.create(**fields, stream=True))
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_first_example_of_the_clients_page_runs(
    demo: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "clients.md"
    example = re.search(r"```python\n(.+?)```", page.read_text("utf-8"), re.S)
    assert example
    exec(example[1].replace("http://127.0.0.1:8000", demo.base_url), {})
    assert "Paris" in capsys.readouterr().out
