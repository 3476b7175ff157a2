"""Fixtures: a model folder with a byte-level tokenizer, and a server around a FakeEngine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from server.text.chat_template import ChatTemplate
from server.text.parsers.answers import answers_of
from server.text.render_pool import RenderPool
from server.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine, Script
from tests.support.openai_spec import OpenAISpec, schemas_of_client, schemas_of_document
from tests.support.reference_data import located, reference
from tests.support.render_here import RenderHere
from tests.support.rig import Served, serving

BOS, EOS = 256, 257
CLIENT, DOCUMENT = "client", "openai-spec/openapi.yaml"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('x') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session", autouse=True)
def shared_render_pools() -> Iterator[None]:
    """Every server with the same template uses the same processes, which take 0.1 s to start."""
    pools: dict[bytes, RenderPool] = {}

    class Shared:
        def __init__(self, source: bytes) -> None:
            self._pool = pools.get(source) or pools.setdefault(source, RenderPool(source))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pool, name)

        def close(self) -> None:
            pass

    with mock.patch("server.text.load_template.RenderPool", Shared):
        yield
    for pool in pools.values():
        pool.close()


@pytest.fixture
def renders_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates are rendered in this process, for tests of many templates."""
    monkeypatch.setattr("server.text.load_template.RenderPool", RenderHere)


@pytest.fixture(scope="session", autouse=True)
def shared_answer_formats() -> Iterator[None]:
    """Servers with equal templates and tokens share the formats, which take 30 ms to find."""
    known: dict[object, object] = {}

    def shared(tokenizer: Tokenizer, template: ChatTemplate | None, *names: str) -> object:
        if template is None or tokenizer.response_template is not None:
            return answers_of(tokenizer, template, *names)
        tokens = tuple(tokenizer.added_ids.items()), tokenizer.special_ids, tokenizer.eos_token_ids
        key = (template.sources, tuple(template._special_tokens.items()), tokens, names)
        if key not in known:
            known[key] = answers_of(tokenizer, template, *names)
        return known[key]

    with mock.patch("server.app.answers_of", shared):
        yield


def write_model(folder: Path) -> Path:
    """Write a model folder without weights. Each byte is one token; 256 is BOS and 257 is EOS."""
    folder.mkdir()
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "config.json": {"model_type": "llama", "eos_token_id": EOS, "bos_token_id": BOS},
        "generation_config.json": {
            "temperature": 0.6,
            "top_k": 20,
            "min_p": 0.1,
            "eos_token_id": EOS,
        },
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "chat_template": TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `write_model` writes."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def encode() -> Callable[[str], list[int]]:
    """A function that returns the token ids of a text, without BOS."""
    tokenizer = byte_tokenizer()
    return lambda text: list(tokenizer.encode(text).ids)


@pytest.fixture
def says(encode: Callable[[str], list[int]]) -> Callable[[str], Script]:
    """A function that makes a script: the engine answers every request with a text and EOS."""
    return lambda text: lambda request: [*encode(text), EOS]


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    """The file that `recording` writes."""
    return tmp_path / "record.jsonl"


@pytest.fixture
async def recording(
    model: Path, says: Callable[[str], Script], record_file: Path
) -> AsyncIterator[Served]:
    """A server with --record that answers every request with "Hello"."""
    async with serving(FakeEngine(says("Hello")), model, record=str(record_file)) as running:
        yield running


@pytest.fixture
async def served(model: Path, says: Callable[[str], Script]) -> AsyncIterator[Served]:
    """A server that answers every request with "Hello wörld!"."""
    async with serving(FakeEngine(says("Hello wörld!")), model) as running:
        yield running


@pytest.fixture(scope="session", params=[CLIENT, reference(DOCUMENT)])
def spec(request: pytest.FixtureRequest) -> OpenAISpec:
    """The schemas of the official client, and those of OpenAI's document."""
    is_client = request.param == CLIENT
    return OpenAISpec(schemas_of_client() if is_client else schemas_of_document(located(DOCUMENT)))
