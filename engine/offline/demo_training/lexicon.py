"""The words of translation.toml, read on first use and kept in the order of that file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.offline.demo_training.draws import Draws

# Indices of an adjective's or a possessive's Swedish forms: with en, with ett, in the plural.
EN, ETT, PLURAL = range(3)


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


class Mass(NamedTuple):
    """A noun without a plural."""

    english: str
    swedish: str
    kinds: frozenset[str]


class Verb(NamedTuple):
    base: str
    third: str
    past: str
    infinitive: str
    swedish_present: str
    swedish_past: str
    kind: str = "-"  # of its objects; "-" for any


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
    separator = "," if "," in text else "\n"
    lines = text.strip().split(separator)
    return tuple(tuple(line.split()) for line in lines)


@cache
def nouns(kind: str = "-") -> tuple[Noun, ...]:
    found = []
    for row in entries("nouns"):
        one, many, article, swedish, definite, plural, plural_definite, *row_kinds = row
        kinds = frozenset(row_kinds)
        if "person" not in kinds:
            kinds |= {"thing"}
        found.append(Noun(one, many, article, swedish, definite, plural, plural_definite, kinds))
    return tuple(noun for noun in found if kind == "-" or kind in noun.kinds)


@cache
def masses(kind: str) -> tuple[Mass, ...]:
    found = []
    for english, swedish, *own_kinds in entries("masses"):
        kinds = frozenset(["-", "thing", *own_kinds])
        if kind in kinds:
            found.append(Mass(english, swedish, kinds))
    return tuple(found)


@cache
def adjectives(kinds: frozenset[str]) -> tuple[Adjective, ...]:
    found = []
    for row in entries("adjectives"):
        adjective = Adjective(*row)
        if adjective.kind == "-" or adjective.kind in kinds:
            found.append(adjective)
    return tuple(found)


class LexiconDraws(Draws):
    """Draws entries and names of translation.toml."""

    def entry(self, kind: str) -> tuple[str, ...]:
        return self.choice(entries(kind))

    def name(self) -> str:
        """Return a known name or, less often, an invented one, to be copied letter by letter."""
        if self.chance(0.75):
            return self.choice(lexicon().names.split())
        name = ""
        for _ in range(self.randint(2, 3)):
            name += self.choice("bdfghjklmnprstv")
            name += self.choice("aeiouy")
        name += self.choice(("", "", "n", "r", "s"))
        return name.capitalize()
