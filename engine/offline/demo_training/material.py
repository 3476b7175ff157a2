"""The words and phrases of material.toml, read on first use and never when serving.

They keep the order of that file, because items are drawn by index.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.offline.demo_training.draws import Draws

# The parts of a coined name's syllables. Frequent ones stand twice.
ONSETS = (
    *("b", "b", "br", "ch", "d", "d", "f", "fl", "g", "gr", "h", "h", "j", "k", "k", "kr", "l"),
    *("l", "m", "m", "n", "n", "p", "pr", "r", "r", "s", "s", "sh", "sk", "st", "t", "t", "th"),
    *("tr", "v", "v", "w", "y", "z"),
)
VOWELS = (
    *("a", "a", "a", "e", "e", "e", "i", "i", "o", "o", "u", "u"),
    *("ai", "ea", "ei", "ie", "oo", "ou", "y", "å", "ä", "ö"),
)
CODAS = (
    *("", "", "", "", "l", "l", "m", "n", "n", "ng", "r", "r", "s", "s", "t"),
    *("ck", "ld", "nd", "rd", "rg", "rk", "st"),
)
TO_ASCII = str.maketrans("åäö", "aao")


class Material(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of material.toml, whose comments explain each part."""

    words: dict[str, str]
    pairs: dict[str, dict[str, str]]
    forms: dict[str, list[str]]
    answers: dict[str, str]
    small_talk: list[dict[str, list[str]]]
    records: list[dict[str, list[str]]]


@cache
def material() -> Material:
    """Read material.toml. Raises msgspec.ValidationError if a field is missing or unknown."""
    path = Path(__file__).with_name("material.toml")
    return msgspec.toml.decode(path.read_bytes(), type=Material)


@cache
def words(kind: str) -> tuple[str, ...]:
    text = material().words[kind]
    return tuple(text.split())


@cache
def pairs(kind: str) -> tuple[tuple[str, str], ...]:
    rows = material().pairs[kind]
    return tuple(rows.items())


class Question(NamedTuple):
    """A question of the user and the answer that the model learns."""

    text: str
    answer: str
    brief: str = ""  # the answer in one word, without a sentence
    foldable: bool = True  # whether the question may lose capitals and punctuation


class MaterialDraws(Draws):
    """Draws words, names and phrases of material.toml."""

    def word(self, kind: str) -> str:
        return self.choice(words(kind))

    def pair(self, kind: str) -> tuple[str, str]:
        return self.choice(pairs(kind))

    def city(self) -> str:
        _, city = self.pair("capitals")
        return city

    def form(self, kind: str, *values: object, **named: object) -> str:
        """Return one of the phrasings of a kind, filled in."""
        form = self.choice(material().forms[kind])
        return form.format(*values, **named)

    def question(self, kind: str, *values: object) -> Question:
        """Return a question of a kind and its answer. The last value is the brief answer."""
        text = self.form(kind, *values)
        answer = material().answers[kind].format(*values)
        brief = str(values[-1])
        return Question(text, answer, brief)

    def person(self) -> str:
        if self.chance(0.2):
            return self.invented_name()
        return self.word("names")

    def invented_name(self) -> str:
        """Return a name that is in no list, so that the model must copy rather than recall."""
        name = ""
        for _ in range(self.randint(2, 3)):
            name += self.choice("bdfgklmnprstvz")
            name += self.choice("aeiou")
        ending = self.choice(["", "", "n", "s", "r"])
        return name.capitalize() + ending

    def coined_name(self) -> str:
        """Return a name with more kinds of syllables than an invented one, as of real places."""
        name = ""
        for _ in range(self.randint(1, 3)):
            name += self.choice(ONSETS) + self.choice(VOWELS) + self.choice(CODAS)
        if len(name) < 3:
            name += self.choice(["lo", "na", "rik", "sund"])
        return name.capitalize()

    def coined_word(self) -> str:
        """Return a word for a tool's name or argument, which have only ASCII letters."""
        return self.coined_name().lower().translate(TO_ASCII)
