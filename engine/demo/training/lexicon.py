"""The words of translation.toml, read on first use and kept in the order of that file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec


class Lexicon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of translation.toml, whose comments explain each part."""

    nouns: str
    masses: str
    verbs: str
    stays: str
    adjectives: str
    numbers: str
    possessives: str
    pronouns: str
    objects: str
    prepositions: str
    often: str
    modals: str
    present: str
    past: str
    future: str
    places: str
    names: str
    phrases: dict[str, str]


class Noun(NamedTuple):
    one: str
    many: str
    article: str
    swedish: str
    definite: str
    plural: str
    plural_definite: str
    kinds: frozenset[str]


class Verb(NamedTuple):
    base: str
    third: str
    past: str
    infinitive: str
    swedish_present: str
    swedish_past: str
    kind: str  # of its objects


class Adjective(NamedTuple):
    english: str
    en: str
    ett: str
    plural: str
    definite: str
    kind: str  # of the nouns that it describes

    @property
    def forms(self) -> tuple[str, str, str]:
        return self.en, self.ett, self.plural


@cache
def lexicon() -> Lexicon:
    """Read translation.toml. Raises msgspec.ValidationError if a field is missing or unknown."""
    path = Path(__file__).with_name("translation.toml")
    return msgspec.toml.decode(path.read_bytes(), type=Lexicon)


@cache
def entries(kind: str) -> tuple[tuple[str, ...], ...]:
    """Return the lines of a table, or the items of a comma-separated list, split into words."""
    text: str = getattr(lexicon(), kind)
    lines = text.split(",") if "," in text else text.strip().split("\n")
    return tuple(tuple(line.split()) for line in lines)


@cache
def nouns(kind: str = "-") -> tuple[Noun, ...]:
    found = []
    for row in entries("nouns"):
        one, many, article, swedish, definite, plural, plural_definite, *said = row
        kinds = frozenset(said if "person" in said else [*said, "thing"])
        found.append(Noun(one, many, article, swedish, definite, plural, plural_definite, kinds))
    return tuple(noun for noun in found if kind == "-" or kind in noun.kinds)


@cache
def adjectives(kinds: frozenset[str]) -> tuple[Adjective, ...]:
    found = (Adjective(*row) for row in entries("adjectives"))
    return tuple(adjective for adjective in found if adjective.kind in kinds | {"-"})
