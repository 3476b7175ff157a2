"""tokenizer.json, within limits: it may be hostile.

The tokenizers library takes gigabytes of memory for a token of 50 MB, and minutes for many added
tokens that are long. So their sizes are checked before the library reads the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from engine.checkpoint.bounded_json import BAD_JSON, read_bounded
from engine.errors import ConfigError

MAX_BYTES = 64_000_000  # Gemma 3's file, with 262,144 tokens and 514,906 merges, has 33 million
MAX_VALUES = 6_000_000  # lists, objects, keys and commas; Gemma 3's file has about 2 million
# Llama 2's longest token has 16 characters and GPT-2's 128.
LONGEST_TOKEN = 4096  # characters
# The library searches a text for all added tokens at once. Building this search takes 5 s of one
# core for a million random characters. Llasa, which speaks, adds 65,536 tokens of 11 characters.
MAX_ADDED_TOKENS = 100_000
MAX_ADDED_CHARACTERS = 1_000_000


class _AddedToken(msgspec.Struct):
    content: str = ""


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] | None = None


class _File(msgspec.Struct):
    """The parts of tokenizer.json that hold tokens. The others are skipped."""

    added_tokens: list[_AddedToken] | None = None
    model: _Model | None = None


def check_tokenizer_file(path: Path) -> None:
    """Raise ConfigError if tokenizer.json is malformed or beyond a limit."""
    try:
        data = read_bounded(path, MAX_BYTES)
        num_values = sum(data.count(mark) for mark in (b"[", b"{", b":", b","))
        if num_values > MAX_VALUES:
            raise ValueError(f"it has {num_values} values; at most {MAX_VALUES} are read")
        found = msgspec.json.decode(data, type=_File)
    except (OSError, msgspec.MsgspecError, *BAD_JSON) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from error
    vocabulary = found.model.vocab if found.model is not None else None
    if isinstance(vocabulary, list):
        check_tokens((token for token, _ in vocabulary), str(path))
    else:
        check_tokens(vocabulary or {}, str(path))
    check_added_tokens([token.content for token in found.added_tokens or []], str(path))


def check_tokens(tokens: Iterable[str], source: str) -> None:
    """Raise ConfigError, which begins with `source`, if a token is too long."""
    longest = max(map(len, tokens), default=0)
    if longest > LONGEST_TOKEN:
        raise ConfigError(
            f"{source} has a token of {longest} characters; at most {LONGEST_TOKEN} are read."
        )


def check_added_tokens(tokens: Collection[str], source: str) -> None:
    """Raise ConfigError, which begins with `source`, if added tokens are too many or too long."""
    check_tokens(tokens, source)
    if len(tokens) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{source} has {len(tokens)} added tokens; at most {MAX_ADDED_TOKENS} are read."
        )
    length = sum(map(len, tokens))
    if length > MAX_ADDED_CHARACTERS:
        raise ConfigError(
            f"{source} has added tokens of {length} characters in all; at most "
            f"{MAX_ADDED_CHARACTERS} are read."
        )
