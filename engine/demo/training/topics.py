"""The topics of the demo model. Each topic draws one question and its answer.

The words and phrases come from material.toml, which is read on first use and never when serving.
They keep the order of that file, because items are drawn by index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from engine.demo.training.chat import dump

STEPS = ((1, ""), (1, ""), (2, " by twos"), (3, " by threes"), (5, " by fives"), (10, " by tens"))


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
    return tuple(material().words[kind].split())


@cache
def pairs(kind: str) -> tuple[tuple[str, str], ...]:
    return tuple(material().pairs[kind].items())


class Ask(NamedTuple):
    question: str
    answer: str
    brief: str = ""  # the answer in one word, without a sentence
    fold: bool = True  # whether the question may lose capitals and punctuation


def held_out(a: int, b: int) -> bool:
    """Whether training questions leave out a pair of numbers: about one in 23 two-digit pairs."""
    low, high = sorted((a, b))
    return low >= 10 and (31 * low + 17 * high) % 23 == 0


def worked(a: int, b: int, sign: str) -> str:
    """Return a calculation digit by digit: "7 + 8 = 15, 3 + 4 + 1 = 8, so 37 + 48 = 85."."""
    way = 1 if sign == "+" else -1
    result = a + way * b
    if result < 0:
        return f"{a} - {b} is below zero, I do not know such numbers."
    if a < 10 and b < 10:
        return f"{a} {sign} {b} = {result}."
    (tens, ones), (more_tens, more_ones) = divmod(a, 10), divmod(b, 10)
    if ones + way * more_ones < 0:
        tens, ones = tens - 1, ones + 10
    last = ones + way * more_ones
    carry, first = " + 1" * (last > 9), tens + way * more_tens + (last > 9)
    steps = f"{ones} {sign} {more_ones} = {last}, {tens} {sign} {more_tens}{carry} = {first}"
    return f"{steps}, so {a} {sign} {b} = {result}."


@cache
def copied() -> tuple[str, ...]:
    countries, cities = zip(*pairs("capitals"), strict=True)
    return (*words("spelled"), *words("colours"), *words("names"), *countries, *cities)


class Draws(Random):
    """A seeded random generator that also draws words, names, and the questions of each topic."""

    def word(self, kind: str) -> str:
        return self.choice(words(kind))

    def pair(self, kind: str) -> tuple[str, str]:
        return self.choice(pairs(kind))

    def city(self) -> str:
        return self.pair("capitals")[1]

    def form(self, kind: str, *values: object, **named: object) -> str:
        """Return one of the phrasings of a kind, filled in."""
        return self.choice(material().forms[kind]).format(*values, **named)

    def said(self, kind: str, *values: object) -> Ask:
        """Return a question of a kind and its answer. The last value is the brief answer."""
        question, answer = self.form(kind, *values), material().answers[kind].format(*values)
        return Ask(question, answer, str(values[-1]))

    def invented_name(self) -> str:
        """Return a name that is in no list, so that the model must copy rather than recall."""
        syllables = range(self.randint(2, 3))
        parts = [self.choice("bdfgklmnprstvz") + self.choice("aeiou") for _ in syllables]
        return "".join(parts).capitalize() + self.choice(["", "", "n", "s", "r"])

    def person(self) -> str:
        return self.invented_name() if self.random() < 0.2 else self.word("names")

    def chat(self) -> Ask:
        talk = self.choice(material().small_talk)
        return Ask(self.choice(talk["asks"]), self.choice(talk["answers"]))

    def capital(self) -> Ask:
        country, city = self.pair("capitals")
        if self.random() < 0.15:
            return self.said("country", city, country, country[0].upper() + country[1:])
        if self.random() < 0.08:
            country, city = self.pair("capital_aliases")
        return self.said("capital", country, city)

    def number_pair(self) -> tuple[int, int]:
        while True:
            low, top = self.choices([(10, 99), (0, 99), (0, 12)], [75, 20, 5])[0]
            a, b = self.randint(low, top), self.randint(low, top)
            if not held_out(a, b):
                return a, b

    def arithmetic(self) -> Ask:
        (a, b), kind, brief = self.number_pair(), self.random(), ""
        if kind < 0.43:
            sign, named = "+", "plus"
        elif kind < 0.86:
            sign, named = "-", "minus"
            if a < b and self.random() < 0.9:
                a, b = b, a
        else:
            a, b = self.randint(1, 10), self.randint(1, 10)
            sign, named, brief = self.choice("*x"), "times", str(a * b)
        answer = f"{a} {sign} {b} = {brief}." if brief else worked(a, b, sign)
        if self.random() < 0.45:
            return Ask(self.form(named, a, b), answer, brief)
        return Ask(self.form("arithmetic", a, sign, b), answer, brief)

    def compare(self) -> Ask:
        a, b = self.sample(range(100), 2)
        sense, pick, other = ("larger", max, min) if self.random() < 0.5 else ("smaller", min, max)
        return self.said("compare", self.form(sense), a, b, sense, other(a, b), pick(a, b))

    def counting(self) -> Ask:
        step, by = self.choice(STEPS)
        length = self.randint(4, 12)
        start = self.choice([1, self.randint(0, 40)]) if step == 1 else step * self.randint(0, 5)
        numbers = range(start, start + step * length, step)
        down = self.random() < 0.4
        kind = ("count down" if down else "count") + (" from one" if start == step == 1 else "")
        question = self.form(kind, start, numbers[-1], by, words("numbers")[length - 1])
        return Ask(question, ", ".join(map(str, numbers[::-1] if down else numbers)))

    def spelling(self) -> Ask:
        word, quotes = self.word("spelled"), self.choice(material().forms["quotes"])
        kind, quoted = self.random(), quotes.format(word)
        if kind < 0.45:
            return self.said("spell", quoted, word, "-".join(word))
        if kind < 0.75:
            short = self.choice([entry for entry in words("spelled") if len(entry) <= 5])
            return self.said("reverse", quotes.format(short), short, "-".join(reversed(short)))
        if kind < 0.9:
            return self.said("letters", quoted, word, len(word))
        place, letter = self.choice([("first", word[0]), ("last", word[-1])])
        return self.said("letter", place, quoted, word, letter)

    def opposite(self) -> Ask:
        left, right = self.pair("opposites")
        if self.random() < 0.5 and left not in words("one_way_opposites"):
            left, right = right, left
        quoted = self.choice([left, left, f"'{left}'", f'"{left}"'])
        return self.said("opposite", quoted, left, right)

    def calendar(self) -> Ask:
        kind = self.random()
        noun, group = ("day", "week") if self.random() < 0.5 else ("month", "year")
        names = words(f"{noun}s")
        at = self.randrange(len(names))
        name, nth = names[at], words("ordinals")[at]
        if kind < 0.5:
            word, step = self.choice([("after", 1), ("before", -1)])
            return self.said("neighbour", name, word, noun, names[(at + step) % len(names)])
        if kind < 0.7:
            month, days = self.pair("month_days")
            return self.said("days", month, ", and 29 in a leap year" * (month == "February"), days)
        if kind < 0.94:
            if self.random() < 0.3:
                answer = f"{name} is the {nth} {noun} of the {group}."
                return Ask(f"Which {noun} of the {group} is {name}?", answer, nth)
            return self.said("nth", nth, noun, group, name)
        return Ask(self.form("list", noun, group), ", ".join(names) + ".")

    def small_fact(self) -> Ask:
        question, answer = self.pair("facts")
        return Ask(self.form("before a fact") + question, answer)

    def swedish_sentence(self) -> tuple[str, str]:
        subject, jag = self.pair("swedish_subjects")
        verbs, har = self.pair("swedish_verbs")
        noun, en_bil = self.pair("swedish_nouns")
        verb = verbs.split("/")[subject in ("He", "She")]
        article, bil = en_bil.split()
        if self.random() >= 0.25:
            adjective, both = self.pair("swedish_adjectives")
            noun, bil = f"{adjective} {noun}", f"{both.split()[article == 'ett']} {bil}"
        return f"{subject} {verb} a {noun}", f"{jag} {har} {article} {bil}"

    def swedish(self) -> Ask:
        phrase = self.random() < 0.4
        source, target = self.pair("swedish_phrases") if phrase else self.swedish_sentence()
        language = "Swedish"
        if self.random() < 0.5:
            source, target, language = target, source, "English"
        dot = "" if source.endswith("?") else self.choice(["", "."])
        end = "" if target.endswith("?") else "."
        chosen = self.choice(material().forms["translate"])
        return Ask(chosen.format(source + dot * chosen.startswith("T"), language), target + end)

    def json_record(self) -> Ask:
        drawn: dict[str, str | int] = {"name": self.person(), "age": self.randint(2, 95)}
        drawn["city"] = self.city()
        drawn |= {key: self.word(f"{key}s") for key in ("job", "colour", "item")}
        drawn["price"] = self.randint(2, 99)
        record = self.choice(material().records)
        keys = list(record["keys"])
        if self.random() < 0.25:
            self.shuffle(keys)
        listed = " and ".join([", ".join(keys[:-1]), keys[-1]])
        request, text = self.choice(material().forms["json"]), self.choice(record["texts"])
        answer = dump({key: drawn[key] for key in keys})
        return Ask(request.format(listed, text.format(**drawn)), answer, answer, fold=False)

    def repeat(self, length: int) -> Ask:
        text = " ".join(self.choices(copied(), k=length))
        if self.random() < 0.3:
            text = f"{text} {self.invented_name()}"
        return Ask(self.form("repeat", text), f"You said: {text}", text, fold=False)

    def echo(self) -> Ask:
        if self.random() < 0.5:
            return self.repeat(self.randint(1, 6))
        length = self.choice([1, 2, 2, 3, 4])
        text = " ".join(self.choices([*copied(), "hello", "hello", "hi"], k=length))
        return Ask(self.form("say", text), text, text, fold=False)

    def rehearsal(self) -> Ask:
        """Return an exercise with many words to copy, quote or spell, which every topic needs."""
        kind = self.random()
        if kind < 0.45:
            return self.repeat(self.randint(3, 10))
        if kind < 0.75:
            listed = [*self.choices(copied(), k=self.randint(2, 7)), self.invented_name()]
            self.shuffle(listed)
            question, answer = f"Write as JSON: {', '.join(listed)}", dump(listed)
        else:
            listed = self.choices(words("spelled"), k=self.randint(2, 5))
            question, answer = f"Spell: {', '.join(listed)}", ", ".join(map("-".join, listed))
        return Ask(question, answer, fold=False)

    def unknown(self) -> Ask:
        if self.random() < 0.5:
            question = self.form("unknown")
        else:
            nouns = [*words("unknown"), f"a {self.word('spelled')}", self.invented_name()]
            question = self.form("unknown subject", self.choice(nouns))
        if self.random() < 0.1:
            question = f"What is the capital of {self.invented_name()}?"
        if self.random() < 0.1:
            a, b, sign = self.randint(100, 9999), self.randint(100, 9999), self.choice("+-*/")
            answer = "I am a tiny demo model, I only know numbers below one hundred."
            return Ask(f"What is {a} {sign} {b}?", answer)
        return Ask(question, self.form("unknown answer"))

    def story(self) -> Ask:
        """Return a fixed plot with drawn words: 60 to 150 words, enough to watch a stream."""
        hero, friend = self.sample(words("heroes"), 2)
        drawn = {"hero": hero, "friend": friend, "name": self.word("names")}
        drawn |= {key: self.word(f"{key}s") for key in ("trait", "place", "thing")}
        kind = self.choices(["story", "story about", "story named", "long story"], [2, 4, 2, 2])[0]
        trouble = ["trouble"] if kind == "long story" else []
        plot = ["opening", "find", "wonder", "meeting", *trouble, "return", "ending"]
        return Ask(self.form(kind, **drawn), " ".join(self.form(p, **drawn) for p in plot))


# Each topic and its relative weight.
TOPICS: dict[Callable[[Draws], Ask], float] = {
    Draws.chat: 12, Draws.capital: 9, Draws.arithmetic: 18, Draws.compare: 4, Draws.counting: 9,
    Draws.spelling: 13, Draws.opposite: 5, Draws.calendar: 6, Draws.small_fact: 2, Draws.swedish: 8,
    Draws.json_record: 6, Draws.echo: 4, Draws.unknown: 6, Draws.story: 1.5,
}  # fmt: skip
