"""The tokens that end an answer: all that a file of the checkpoint names.

A chat model that was tuned from a base model often has the end of a turn in one file only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, listed


@dataclass(frozen=True)
class EndTokens:
    """The ids, those of the first file first. `note` says how the files differ, if they do."""

    ids: tuple[int, ...]
    note: str = ""


def end_tokens(
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
    eos_token: int | None,
    size: int | None,
    folder: Path,
) -> EndTokens:
    """Return the union of the ids in generation_config.json, config.json and the tokenizer's EOS.

    `size` is vocab_size. Raises ConfigError if the first file that names ids has one which is no
    token id. Such an id in another file is left out.
    """
    text = model.get("text_config")
    sources = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": model.get("eos_token_id"),
        "text_config in config.json": text.get("eos_token_id") if isinstance(text, dict) else None,
        "the tokenizer": eos_token,
    }
    given = {name: _listed(value) for name, value in sources.items() if value is not None}
    if not given:
        return EndTokens(())
    first = next(iter(given.values()))
    if wrong := [number for number in first if not _is_token(number, size)]:
        raise ConfigError(
            f"eos_token_id in {folder} is {wrong[0]!r:.80}; it must be a token id below "
            f"vocab_size = {size} in config.json."
        )
    everything = [number for numbers in given.values() for number in numbers]
    ids = tuple(dict.fromkeys(number for number in everything if _is_token(number, size)))
    if set(everything) <= set(first):
        return EndTokens(ids)
    named = "; ".join(f"{name}: {listed(ids, 20)}" for name, ids in given.items())
    return EndTokens(ids, f"the files differ in the end of an answer ({named}); each id ends one")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_token(number: Any, size: int | None) -> bool:
    return type(number) is int and number >= 0 and (size is None or number < size)
