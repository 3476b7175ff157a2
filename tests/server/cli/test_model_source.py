"""Encoder–decoders: the prompt is the source text, and the answer is a separate text."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError
from engine.protocol.generate import GenerateRequest
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.reference_data import located
from tests.support.rig import Served, serving

START, END = 0, 1
TOKENIZER = located("tokenizers/unigram")
VOCAB_SIZE = len(json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]) + 1
SENTINEL = VOCAB_SIZE - 1  # <extra_id_0>, a special token
READY = msgspec.structs.replace(
    INFO, kind="encoder-decoder", start_token=START, vocab_size=VOCAB_SIZE, max_model_len=512
)
DAN = {"role": "user", "content": "Dan loves icecream"}


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer like T5's with generation settings that suppress the padding token."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    shutil.copytree(TOKENIZER, folder)
    write(folder / "config.json", {"eos_token_id": END, "vocab_size": VOCAB_SIZE})
    # The last one has no logit.
    banned = {"bad_words_ids": [[0]], "suppress_tokens": [2, VOCAB_SIZE]}
    write(folder / "generation_config.json", banned)
    return folder


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture(scope="session")
def tokenizer(t5: Path) -> Tokenizer:
    return load_tokenizer(t5)


@pytest.fixture
async def served(t5: Path, tokenizer: Tokenizer) -> AsyncIterator[Served]:
    script = tokenizer.encode("Dan älskar glass")
    async with serving(FakeEngine(lambda request: script, info=READY), t5) as running:
        yield running


async def test_completion_sends_the_prompt_as_source(served: Served, tokenizer: Tokenizer) -> None:
    source = tokenizer.encode("Dan loves icecream")
    assert source[-1] == END
    body = (await served.complete(prompt="Dan loves icecream", n=2)).json()
    first, second = served.engine.requests
    assert (
        (first.encoder_prompt, first.prompt)
        == (second.encoder_prompt, second.prompt)
        == (source, [START])
    )
    assert first.params.max_tokens == 511
    assert first.params.stop_token_ids == (END,)
    assert [choice["text"] for choice in body["choices"]] == ["Dan älskar glass"] * 2
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len(source)
    await served.complete(prompt=[[8, 9, 1], [7]])
    assert [(r.encoder_prompt, r.prompt) for r in served.engine.requests[2:]] == [
        ([8, 9, 1], [START]),
        ([7], [START]),
    ]


async def test_completion_suppresses_the_checkpoints_banned_tokens(served: Served) -> None:
    await served.complete(prompt="a", logit_bias={"5": 3, "0": 100})
    bias = dict(served.engine.requests[0].params.logit_bias)
    assert bias == {5: 3.0, 0: float("-inf"), 2: float("-inf")}


async def test_return_token_ids_gives_source_and_answer(served: Served) -> None:
    body = (await served.complete(prompt=[8, 1], return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == [8, 1]
    assert choice["token_ids"][-1] == END
    assert START not in choice["token_ids"]


@pytest.mark.parametrize("skip", [True, False])
async def test_stream_text_equals_decoding_all_tokens(
    t5: Path, tokenizer: Tokenizer, skip: bool
) -> None:
    rng = random.Random(3)

    def script(request: GenerateRequest) -> list[int]:
        return [*(rng.choice((3, 2, SENTINEL, rng.randrange(2, SENTINEL))) for _ in range(30)), END]

    async with serving(FakeEngine(script, info=READY), t5) as running:
        for _ in range(20):
            fields = {"stream": True, "return_token_ids": True, "skip_special_tokens": skip}
            response = await running.complete(prompt="a", **fields)
            lines = response.text.replace("data: [DONE]", "").split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.strip()]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            text = "".join(choice["text"] for choice in choices)
            ids = [i for choice in choices for i in choice.get("token_ids") or []]
            assert text == tokenizer.decode(ids[:-1], skip_special_tokens=skip)


async def test_chat_without_template_encodes_the_message_as_source(
    served: Served, tokenizer: Tokenizer
) -> None:
    answer = await served.openai.chat.completions.create(model="t5", messages=[DAN])
    assert answer.choices[0].message.content == "Dan älskar glass"
    assert served.engine.requests[0].encoder_prompt == tokenizer.encode("Dan loves icecream")
    ids = (await served.http.post("/tokenize", json={"messages": [DAN]})).json()["tokens"]
    assert ids == tokenizer.encode("Dan loves icecream")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "system", "content": "Be brief."}, DAN]}, "messages"),
        ({"messages": [DAN, {"role": "assistant", "content": "Hej"}, DAN]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Hej"}]}, "messages"),
        ({"messages": [DAN], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [DAN], "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_chat_without_template_refuses_other_messages(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    response = await served.chat(**{"model": "t5", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "no chat template" in error["message"]


async def test_chat_with_template_encodes_all_messages(
    t5: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}</s>")
    async with serving(
        FakeEngine(lambda request: [END], info=READY), t5, chat_template=str(template)
    ) as running:
        await running.chat(model="t5", messages=[{"role": "system", "content": "translate:"}, DAN])
    expected = tokenizer.encode("translate: Dan loves icecream </s>", add_special_tokens=False)
    assert running.engine.requests[0].encoder_prompt == expected


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"prompt": [5] * 513}, ("512", "513")),
        ({"prompt": [5] * 513, "max_tokens": 5}, ("512", "the prompt alone has 513")),
    ],
)
async def test_source_and_answer_are_limited_separately(
    served: Served, fields: dict[str, Any], numbers: tuple[str, str]
) -> None:
    response = await served.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert all(number in error["message"] for number in numbers)
    for most in (511, 512):
        answer = await served.complete(prompt=[5] * 512, max_tokens=most)
        assert answer.status_code == 200
        assert served.engine.requests[-1].params.max_tokens == 511
        assert ("x-adjusted-params" in answer.headers) == (most == 512)


async def test_echo_and_prompt_logprobs_are_refused(served: Served) -> None:
    for name, value in (("echo", True), ("prompt_logprobs", 0)):
        response = await served.complete(**{name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_models_reports_kind_encoder_decoder(served: Served) -> None:
    [model] = (await served.http.get("/v1/models")).json()["data"]
    assert model["kind"] == "encoder-decoder"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bad_words_ids": [[3, 4]]}, "bad_words_ids"),
        ({"bad_words_ids": 7.5}, "bad_words_ids"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens"),
        ({"forced_bos_token_id": 5}, "forced_bos_token_id = 5"),
    ],
)
def test_tokenizer_with_unsupported_generation_setting_raises(
    t5: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(t5, folder)
    write(folder / "generation_config.json", settings)
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(folder)


def test_tokenizer_without_generation_config_reads_config(t5: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(t5, folder)
    (folder / "generation_config.json").unlink()
    write(folder / "config.json", {"eos_token_id": END, "bad_words_ids": [[7]]})
    assert load_tokenizer(folder).suppressed_ids == (7,)


def test_tokenizer_lists_ignored_generation_settings(t5: Path, tmp_path: Path) -> None:
    """An ignored num_beams is why OPUS-MT's answers differ from those of transformers."""
    folder = tmp_path / "model"
    shutil.copytree(t5, folder)
    write(folder / "config.json", {"eos_token_id": END, "num_beams": 6})
    file = folder / "generation_config.json"
    nothing = {"typical_p": 1.0, "guidance_scale": 1, "begin_suppress_tokens": [], "top_k": 50}
    write(file, {"num_beams": 1, "max_new_tokens": None, **nothing})
    assert load_tokenizer(folder).not_followed == []
    write(file, {**nothing, "max_new_tokens": 512, "sequence_bias": [[[7], 1.5]] * 500})
    tokens, bias = load_tokenizer(folder).not_followed
    assert tokens == "max_new_tokens 512"
    assert bias.startswith("sequence_bias [[[7], 1.5], ")
    assert len(bias) < 60, "a long value is truncated"
    file.unlink()
    assert load_tokenizer(folder).not_followed == ["num_beams 6"]
