"""PairTemplate: how a tokenizer joins two texts for a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.bounded_json import read_optional
from engine.errors import ConfigError
from server.text.tokenizer import Tokenizer

TYPES = "token_type_ids"
# The tokenizers of transformers 5.24 that give a model token types, if the files do not say. Any
# other class, such as PreTrainedTokenizerFast, gives none.
TYPED = frozenset(
    {"BertTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "MobileBertTokenizer"}
)
CLASS_OF_TYPE = {"bert": "BertTokenizer", "nomic_bert": "BertTokenizer"}


@dataclass(frozen=True)
class PairTemplate:
    """The special tokens before, between and after two texts.

    The first `untyped` tokens behind the first text have type 0, all later ones type 1. None: all
    tokens of a pair have type 0.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    untyped: int | None = None

    @property
    def added_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        return [*self.before, *first, *self.between, *second, *self.after]

    def second(self, first: Sequence[int]) -> int:
        """Return the index of the first token of type 1 behind a first text; 0: there is none."""
        return 0 if self.untyped is None else len(self.before) + len(first) + self.untyped

    def fit(
        self, first: list[int], second: list[int], most: int, *, keep_end: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the texts cut so that the pair has at most `most` tokens, the longer one first.

        Their ends are cut off, or their beginnings with `keep_end`.
        """
        sizes = longest_first(len(first), len(second), max(most - self.added_tokens, 0))
        return cut(first, sizes[0], keep_end=keep_end), cut(second, sizes[1], keep_end=keep_end)


def cut(ids: list[int], most: int, *, keep_end: bool = False) -> list[int]:
    """Return the first `most` ids, or the last ones."""
    return ids[max(len(ids) - most, 0) :] if keep_end else ids[:most]


def longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """Return the lengths that two texts keep of `most` tokens.

    The rule is that of huggingface/tokenizers (utils/truncation.rs). If both texts are longer than
    a half, the longer one gets an odd token, and the second one if they are equally long.
    """
    if first + second <= most:
        return first, second
    shorter, longer = sorted((first, second))
    kept = min(shorter, most // 2)
    rest = min(longer, most - kept)
    return (kept, rest) if first <= second else (rest, kept)


def read_pair_template(tokenizer: Tokenizer, folder: Path) -> PairTemplate:
    """Return the template of a checkpoint's tokenizer.

    Raises ConfigError if the tokenizer puts the second text first, or has other types than 0 up to
    one place and 1 behind it.
    """
    pair = tokenizer.encode_pair("a", "a")
    if 0 not in pair.texts or 1 not in pair.texts:
        raise ConfigError(f"{folder / 'tokenizer.json'} encodes the text 'a' as no tokens.")
    count, ids = len(pair.ids), pair.ids
    starts = [pair.texts.index(text) for text in (0, 1)]
    ends = [count - pair.texts[::-1].index(text) for text in (0, 1)]
    if ends[0] > starts[1]:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} joins two texts so that the second comes first or within "
            "the other one, which is not supported."
        )
    untyped = None
    if gives_types(tokenizer, folder) and 1 in pair.types:
        untyped = pair.types.index(1) - ends[0]
        if untyped < 0 or untyped > starts[1] - ends[0] or 0 in pair.types[ends[0] + untyped :]:
            raise ConfigError(
                f"{folder / 'tokenizer.json'} gives two texts the token types {pair.types}; "
                "supported: 0 up to the end of the first text, then 1."
            )
    before, between, after = ids[: starts[0]], ids[ends[0] : starts[1]], ids[ends[1] :]
    return PairTemplate(tuple(before), tuple(between), tuple(after), untyped)


def gives_types(tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether the checkpoint's tokenizer gives a model token types, as in transformers."""
    names = read_optional(folder / "tokenizer_config.json").get("model_input_names")
    if isinstance(names, list):
        return TYPES in names
    config = read_optional(folder / "config.json")
    return _class_of(tokenizer, config).removesuffix("Fast") in TYPED


def _class_of(tokenizer: Tokenizer, config: Mapping[str, object]) -> str:
    name = tokenizer.class_name or config.get("tokenizer_class")
    return name if isinstance(name, str) else CLASS_OF_TYPE.get(str(config.get("model_type")), "")
