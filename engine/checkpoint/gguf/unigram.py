"""A Unigram tokenizer in a GGUF file, of the kind "t5": XLM-RoBERTa's and Jina Embeddings'.

llama.cpp's converter stores SentencePiece's table of normalised characters as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from engine.checkpoint.gguf.end_tokens import KEY, token_id
from engine.errors import ConfigError

SPACE = "▁"
CHARACTERS = f"{KEY}precompiled_charsmap"
MERGES_SPACES = f"{KEY}remove_extra_whitespaces"


def unigram(
    settings: Mapping[str, Any], tokens: Sequence[str], scores: Sequence[float]
) -> Tokenizer:
    """Return the tokenizer. Raises ConfigError if the file names no unknown token."""
    unknown = token_id(settings, "unknown", len(tokens))
    if unknown is None:
        raise ConfigError(f"The GGUF file lacks {KEY}unknown_token_id, which Unigram needs.")
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, False))
    merges_spaces = bool(settings.get(MERGES_SPACES, False))
    steps: list[Any] = []
    if table := _table(settings):
        steps.append(normalizers.Precompiled(table))
    if merges_spaces:
        ends, between = Regex("^ +| +$"), Regex(" {2,}")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(between, " ")]
    has_space = merges_spaces or settings.get(f"{KEY}add_space_prefix", False)
    if has_space:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    last = [decoders.Strip(" ", 1, 0)] if has_space else []
    marks: list[Any] = [decoders.Replace(SPACE, " "), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(marks)
    return tokenizer


def _table(settings: Mapping[str, Any]) -> bytes:
    """Return the table of characters; none of it if the file has none.

    It begins with the size of its tree. Raises ConfigError if it is cut.
    """
    given = settings.get(CHARACTERS, [])
    is_list = isinstance(given, list) and all(type(number) is int for number in given)
    table = bytes(number & 255 for number in given) if is_list else b"\0"
    if table and (len(table) < 4 or int.from_bytes(table[:4], "little") + 4 >= len(table)):
        raise ConfigError(f"{CHARACTERS} in the GGUF file is malformed; convert the model again.")
    return table
