"""A tokenizer's own programs are tried before it is used, and a panic is an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, normalizers
from tokenizers.normalizers import NFKC, Prepend, Replace
from tokenizers.pre_tokenizers import Split

from engine.errors import ConfigError
from server.text.load_tokenizer import load_tokenizer, tokenizer_of
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_errors import TokenizerError
from server.text.tokenizer_trial import tokenizer_problem
from tests.server.conftest import byte_tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.reference_data import (
    BYTE_LEVEL,
    LLAMA,
    UNIGRAM,
    WORDPIECE,
    located,
    references,
)
from tests.support.rig import serving

CATASTROPHIC = Split(Regex("(a+)+$"), "isolated")


def tokenizer(**parts: Any) -> tokenizers.Tokenizer:
    backend = byte_tokenizer()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


OWN_FILES = [f"{name}/tokenizer.json" for name in (BYTE_LEVEL, WORDPIECE, UNIGRAM, LLAMA)]


@pytest.mark.parametrize("name", [*OWN_FILES, *references("**/tokenizer.json")])
def test_tokenizers_of_checkpoints_have_no_problem(name: str) -> None:
    assert tokenizer_problem(tokenizers.Tokenizer.from_file(str(located(name)))) == ""


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"normalizer": NFKC()}, ""),
        ({"normalizer": Prepend("▁")}, ""),
        ({"normalizer": Replace(Regex(" {2,}"), " ")}, ""),
        ({"normalizer": Prepend("x" * 100)}, "makes 101 characters of a text of 1"),
        ({"normalizer": normalizers.Sequence([Replace("a", "a" * 30)] * 2)}, "makes 900 char"),
        ({"normalizer": normalizers.Sequence([Replace("a", "a" * 30)] * 8)}, "512 MiB of memory"),
        ({"pre_tokenizer": CATASTROPHIC}, "short text"),
    ],
)
def test_parts_that_multiply_or_take_long_are_found(parts: dict[str, Any], problem: str) -> None:
    found = tokenizer_problem(tokenizer(**parts))
    assert problem in found
    assert bool(found) == bool(problem)


def test_from_folder_with_a_problem_raises_error_naming_the_file(
    model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer(normalizer=Prepend("x" * 100)).save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer in .*tokenizer\.json makes 101 characters"):
        load_tokenizer(folder)


@pytest.fixture
def panicking(model: Path) -> Tokenizer:
    """A tokenizer that panics on a run of "a" with another letter behind it."""
    return tokenizer_of(tokenizer(pre_tokenizer=CATASTROPHIC), model)


def test_panic_of_the_library_is_an_error(panicking: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="tokenizers library failed"):
        panicking.encode("a" * 60 + "b")
    with pytest.raises(TokenizerError):
        panicking.offsets("a" * 60 + "b")
    assert panicking.encode("ab")


def test_plain_exception_of_the_library_is_an_error(model: Path, tmp_path: Path) -> None:
    """The library raises Exception itself if the model's token for unknown text is not there."""
    folder = shutil.copytree(model, tmp_path / "model")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = None  # bytes above 127 are then unknown
    document["model"]["unk_token"] = "<missing>"
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("ab")
    with pytest.raises(TokenizerError, match="<missing>"):
        tokenizer.encode("日")


async def test_panic_returns_an_error_body_and_counts_as_500(
    model: Path, says: Any, panicking: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.app.load_tokenizer", lambda folder, lowercase: panicking)
    text = "a" * 60 + "b"
    async with serving(FakeEngine(says("x")), model) as served:
        messages = [{"role": "user", "content": text}]
        for path, body in (
            ("/tokenize", {"prompt": text}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": text, "stream": True}),
        ):
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 500, path
            assert answer.json()["error"]["code"] == "internal_error"
        assert await served.metric("http_requests_total", status="500") == 4
