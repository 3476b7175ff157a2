"""Encoder-decoders over HTTP with the official client: a random T5 and demo-translate."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from engine.offline.demo_training.evaluate import read_probes
from tests.support.process import ROOT
from tests.support.reference_data import located
from tests.support.serve import Server, serving

SOURCES = ["Dan loves icecream", "translate English to German: The house is wonderful. " * 3]


@pytest.fixture(scope="module")
def random_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 with random weights."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    tokenizer = located("tokenizers/unigram")
    vocab_size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    config = transformers.T5Config(vocab_size=vocab_size, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "shared" not in name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    folder = tmp_path_factory.mktemp("random") / "t5"
    model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def expected(random_t5: Path) -> list[tuple[list[int], list[int], str]]:
    """(source ids, 20 answer ids, answer text) of the reference for each source."""
    import torch
    from transformers import T5ForConditionalGeneration

    tokenizer = Tokenizer.from_file(str(random_t5 / "tokenizer.json"))
    tokenizer.no_padding()
    reference = T5ForConditionalGeneration.from_pretrained(random_t5, dtype=torch.float32).eval()
    answers = []
    for text in SOURCES:
        ids = tokenizer.encode(text).ids
        with torch.inference_mode():
            out = reference.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        answer = out[0, 1:].tolist()
        answers.append((ids, answer, tokenizer.decode(answer)))
    return answers


@pytest.fixture(scope="module")
def server(random_t5: Path) -> Iterator[Server]:
    with serving(random_t5, "--dtype", "float32", "--max-model-len", "128") as running:
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_completion_of_t5_equals_the_reference(sdk: openai.OpenAI, expected: Any) -> None:
    fields: dict[str, Any] = {"model": "t5", "temperature": 0, "max_tokens": 20}
    whole = sdk.completions.create(
        prompt=SOURCES, n=2, extra_body={"return_token_ids": True}, **fields
    )
    for choice, (source, ids, text) in zip(
        whole.choices, [e for e in expected for _ in range(2)], strict=True
    ):
        assert choice.model_extra is not None
        assert choice.model_extra["prompt_token_ids"] == source
        assert choice.model_extra["token_ids"] == ids
        assert choice.text == text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(source) for source, _, _ in expected)
    for prompt, (source, _, text) in zip(SOURCES, expected, strict=True):
        chunks = list(sdk.completions.create(prompt=prompt, stream=True, **fields))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        again = sdk.completions.create(prompt=source, **fields)
        assert again.choices[0].text == text
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == len(source)


def test_chat_of_t5_encodes_the_message_as_source(sdk: openai.OpenAI, expected: Any) -> None:
    fields: dict[str, Any] = {
        "model": "t5",
        "temperature": 0,
        "max_tokens": 20,
        "messages": [{"role": "user", "content": SOURCES[0]}],
    }
    whole = sdk.chat.completions.create(logprobs=True, top_logprobs=2, **fields)
    assert whole.choices[0].message.content == expected[0][2]
    scores = whole.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert all(token.top_logprobs[0].token == token.token for token in scores.content)
    chunks = list(sdk.chat.completions.create(stream=True, **fields))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected[0][2]
    word = expected[0][2].split()[3]
    cut = sdk.chat.completions.create(stop=[word], **fields).choices[0]
    assert cut.message.content == expected[0][2].partition(word)[0]
    assert cut.finish_reason == "stop"


def test_t5_with_long_source_or_many_messages_is_refused(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model="t5", prompt=[5] * 129)
    assert long.value.code == "context_length_exceeded"
    assert "128" in long.value.message
    assert "129" in long.value.message
    assert sdk.completions.create(model="t5", prompt=[5] * 128, max_tokens=127).choices
    turns: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    with pytest.raises(openai.BadRequestError) as turned:
        sdk.chat.completions.create(model="t5", messages=turns)
    assert turned.value.param == "messages"


@pytest.fixture(scope="module")
def translator() -> Iterator[Server]:
    with serving("demo-translate") as running:
        yield running


@pytest.mark.slow
async def test_demo_translate_gives_equal_texts_alone_and_batched(translator: Server) -> None:
    probes = read_probes("demo-translate")[:17]
    assert probes[0]["messages"][0]["content"] == "Dan loves icecream"
    async with openai.AsyncOpenAI(
        base_url=f"{translator.base_url}/v1", api_key="-", max_retries=0
    ) as sdk:

        async def translated(text: str) -> str:
            answer = await sdk.completions.create(model="demo-translate", prompt=text)
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].text

        texts = [probe["messages"][0]["content"] for probe in probes]
        together = await asyncio.gather(*map(translated, texts))
        shared = translator.metric("generation_tokens_total")
        assert translator.metric("engine_step_seconds_count") < shared, "no step was shared"
        assert together[0] == "Dan älskar glass"
        assert [await translated(text) for text in texts] == together
        chat = await sdk.chat.completions.create(
            model="demo-translate", messages=probes[0]["messages"], stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chat]
    assert "".join(pieces) == "Dan älskar glass"


@pytest.mark.slow
def test_two_ranks_translate_like_one_over_http() -> None:
    probes = read_probes("demo-translate")[:5]
    texts = [probe["messages"][0]["content"] for probe in probes]
    fields: dict[str, Any] = {"model": "demo-translate", "temperature": 0, "prompt": texts}
    answers = []
    for ranks in ("1", "2"):
        flags = ("--dtype", "float32", "--tensor-parallel-size", ranks)
        with (
            serving("demo-translate", *flags) as running,
            openai.OpenAI(base_url=f"{running.base_url}/v1", api_key="-", max_retries=0) as sdk,
        ):
            answers.append([choice.text for choice in sdk.completions.create(**fields).choices])
    assert answers[0] == answers[1]
    assert answers[1][0] == "Dan älskar glass"


@pytest.mark.slow
def test_penstock_chat_translates_line_by_line(translator: Server) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "server", "chat", "--url", translator.base_url],
        input="Dan loves icecream\nDan loves icecream\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (answer.returncode, answer.stdout) == (0, "Dan älskar glass\n" * 2)
