"""The limit of thoughts has the marks of each format, as tokens or as texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from engine.protocol.thoughts import ThoughtLimit
from server.text.load_tokenizer import tokenizer_of
from server.text.marks import Marks
from server.text.parsers.detect import AnswerFormat
from server.text.parsers.formats import BY_NAME, REASONING_BY_NAME, ChannelFormat
from server.text.parsers.syntax import literals, make_syntax
from server.text.parsers.thoughts import thought_limiter
from server.text.tokenizer import Tokenizer
from tests.server.conftest import EOS, byte_tokenizer, write_model

HARMONY = BY_NAME["harmony"]
TOKEN = re.compile(r"<[^<>]+>|\[/?[A-Z ]+\]")


def limit_of(folder: Path, name: str, prompt: str, *, tokens: bool) -> ThoughtLimit:
    """Return a limit of 9 tokens, as the engine reads it."""
    format, reasoning = (HARMONY, None) if name == "harmony" else (None, REASONING_BY_NAME[name])
    backend = byte_tokenizer()
    texts = " ".join(literals(format, reasoning))
    if tokens:
        backend.add_tokens([AddedToken(text, normalized=False) for text in TOKEN.findall(texts)])
    tokenizer = tokenizer_of(backend, write_model(folder))
    used = {text: i for text, i in tokenizer.added_ids.items() if text in texts}
    syntax = make_syntax(format, reasoning, Marks(used))
    found = AnswerFormat(format, reasoning, "table", True, syntax, syntax)
    limiter = thought_limiter(found, tokenizer)
    assert limiter is not None
    return msgspec.json.decode(limiter(9, prompt), type=ThoughtLimit)


@pytest.mark.parametrize(
    ("name", "reach"),
    [
        ("think", 0),
        ("mistral", 0),
        ("cohere", 0),
        ("gemma4", 10),  # the mark and "thought"
        ("seed_oss", 0),
        ("apertus", 0),
        ("solar_open", 0),
        ("apriel", -1),  # a text opens the thoughts
        ("granite", 0),
        ("gemma3n", 10),
        ("harmony", 0),
    ],
)
def test_marks_that_are_tokens_are_found_by_them(tmp_path: Path, name: str, reach: int) -> None:
    limit = limit_of(tmp_path / "m", name, "", tokens=True)
    assert (limit.budget, limit.is_open, limit.end_tokens) == (9, False, (EOS,))
    assert limit.reach == reach
    assert limit.opens_first == (name == "apriel")
    assert bool(limit.reopening_tokens) == (name != "apriel")
    assert limit_of(tmp_path / "n", name, "", tokens=False).reach == -1


@pytest.mark.parametrize("name", [*REASONING_BY_NAME, "harmony"])
def test_closing_tokens_read_as_the_end(tmp_path: Path, name: str) -> None:
    for tokens in (True, False):
        limit = limit_of(tmp_path / f"{tokens}", name, "", tokens=tokens)
        characters = {token: mark for mark, token in limit.marks.items()}
        text = "".join(
            characters.get(token) or byte_tokenizer().decode([token])
            for token in limit.closing_tokens
        )
        assert re.search(limit.closing, text)
        assert not re.search(limit.opening, text)


def test_prompt_says_whether_thoughts_are_open(tmp_path: Path) -> None:
    assert limit_of(tmp_path / "a", "think", "Hi<think>\n", tokens=True).is_open
    assert not limit_of(tmp_path / "b", "think", "<think>\n</think>\n", tokens=True).is_open
    assert limit_of(tmp_path / "c", "harmony", "<|start|>assistant", tokens=True).before


@pytest.mark.parametrize(
    ("header", "is_thought"),
    [
        ("<|channel|>analysis<|message|>", True),
        ("<|channel|>analysis <|constrain|>text<|message|>", True),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|channel|>commentary to=functions.analysis <|message|>", False),
        ("<|channel|>analysis to=functions.f<|message|>", False),
        ("<|channel|>final<|message|>an analysis", False),
        ("analysis<|message|>", False),
    ],
)
def test_header_of_a_channel_tells_thoughts(tmp_path: Path, header: str, is_thought: bool) -> None:
    assert isinstance(HARMONY, ChannelFormat)
    limit = limit_of(tmp_path / "m", "harmony", "", tokens=False)
    assert bool(re.search(limit.opening, header)) == is_thought


def test_model_without_thoughts_or_without_an_end_has_no_limit(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    tokenizer: Any = tokenizer_of(byte_tokenizer(), folder)
    plain = make_syntax(None, None, Marks({}))
    assert thought_limiter(AnswerFormat(None, None, "none", True, plain, plain), tokenizer) is None
    think = REASONING_BY_NAME["think"]
    syntax = make_syntax(None, think, Marks({}))
    found = AnswerFormat(None, think, "none", True, syntax, syntax)
    assert thought_limiter(found, tokenizer) is not None

    class Endless(Tokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)
            self.eos_token_ids = ()

    assert thought_limiter(found, Endless()) is None
