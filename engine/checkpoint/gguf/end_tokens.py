"""The tokens that end an answer, by llama.cpp's rule, and the types that it gives to tokens.

A GGUF file names few of them, or none. llama.cpp also ends at tokens whose texts are in a list, of
any type. docs/gguf.md has the rule as a table, and how it was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import ConfigError

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
# The beginning of a token of a WordPiece: in a file, of a word; in a checkpoint, of the other ones.
SPACE, CONTINUED = "▁", "##"
DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|ifm|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
# Tokens for fill-in-the-middle. They are looked up by their texts unless a setting names their id.
INFILL_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>", "<|plamo:file_separator|>"),
}
INFILL_MARKS = {
    ("fim_pre", "prefix"): (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>"),
        *("▁<PRE>", "<|code_prefix|>", "<|prefix|>", "<|plamo:fim_prefix|>"),
    ),
    ("fim_suf", "suffix"): (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>"),
        *("▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|plamo:fim_suffix|>"),
    ),
    ("fim_mid", "middle"): (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>"),
        *("▁<MID>", "<|code_middle|>", "<|middle|>", "<|plamo:fim_middle|>"),
    ),
}
# Tokens of gpt-oss, which llama.cpp shows in answers.
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Ends(NamedTuple):
    """`ids` are the tokens that end an answer, those that the file names first.

    `kinds` are the types of all tokens. A token with a known text has the type that llama.cpp
    gives it, not the file's.
    """

    ids: list[int]
    kinds: list[int]


def tokens_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the texts of all tokens, in the order of their ids."""
    tokens = settings.get(f"{KEY}tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f"The GGUF file has no {KEY}tokens, so its text cannot be encoded.")
    if settings.get(f"{KEY}model") == "bert":
        given = settings.get(f"{KEY}token_type")
        kinds = given if isinstance(given, list) and len(given) >= len(tokens) else None
        return _wordpiece_texts(tokens, [NORMAL] * len(tokens) if kinds is None else kinds)
    return tokens


def _wordpiece_texts(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Return the tokens as a checkpoint has them. Control tokens are the same in both."""
    return [
        token
        if kind != NORMAL
        else token.removeprefix(SPACE)
        if token.startswith(SPACE)
        else CONTINUED + token
        for token, kind in zip(tokens, kinds, strict=False)
    ]


def token_id(settings: Mapping[str, Any], name: str, count: int) -> int | None:
    """Return the id of a special token, of `count` tokens: the file's, or llama.cpp's default."""
    number = settings.get(f"{KEY}{name}_token_id")
    if type(number) is not int or not 0 <= number < count:
        number = DEFAULT_IDS.get(str(settings.get(f"{KEY}model")), {}).get(name, -1)
    return number if 0 <= number < count else None


def ends_of(settings: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Ends:
    """Return which of the `tokens` end an answer, and the types of all."""
    ids = {token: number for number, token in enumerate(tokens)}
    count = len(tokens)
    found = [token_id(settings, name, count) for name in ("eos", "eot", "eom")]
    by_text = [ids[text] for text in ENDS if text in ids]
    marks: list[int] = []
    for name, texts in INFILL_ENDS.items():
        number = token_id(settings, name, count)
        if number is None:
            by_text += [ids[text] for text in texts if text in ids]
        else:
            found.append(number)
    for names, texts in INFILL_MARKS.items():
        if all(token_id(settings, name, count) is None for name in names):
            marks += [ids[text] for text in texts if text in ids]
    given = [number for number in found if number is not None]
    changed = list(kinds)
    for number in (*by_text, *marks):
        changed[number] = CONTROL
    for text in SHOWN:
        if text in ids:
            changed[ids[text]] = USER_DEFINED
    ends = dict.fromkeys((*given, *sorted(by_text)))
    for text, kind in _taken_off({tokens[number] for number in ends}).items():
        del ends[ids[text]]
        changed[ids[text]] = kind
    return Ends(list(ends), changed)


def _taken_off(texts: set[str]) -> dict[str, int]:
    """Return which of these ends are none if the others are there, and their types."""
    calls = bool(texts & {"<|call|>", "<|calls|>"})
    found: dict[str, int] = {}
    if "<|end|>" in texts and calls and texts & {"<|return|>", "<|flush|>"}:
        found["<|end|>"] = USER_DEFINED  # it ends a message of gpt-oss, not an answer
    if "</s>" in texts and texts & {"<|tool_response>", "<|plamo:eos|>"}:
        found["</s>"] = NORMAL
    return found
