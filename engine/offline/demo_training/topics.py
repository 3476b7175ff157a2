"""The topics of the demo model. Each topic draws one question and its answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from engine.offline.demo_training.chat import dump
from engine.offline.demo_training.material import MaterialDraws, Question, material, pairs, words
from engine.offline.demo_training.number_topics import arithmetic, compare, counting

STORY_KINDS = {
    "story": 2,
    "story about": 4,
    "story named": 2,
    "long story": 2,
}
PLOT = ("opening", "find", "wonder", "meeting", "return", "ending")
LONG_PLOT = ("opening", "find", "wonder", "meeting", "trouble", "return", "ending")


class Translation(NamedTuple):
    english: str
    swedish: str


@cache
def copied() -> tuple[str, ...]:
    """Return the words and names that the model learns to copy."""
    countries, cities = zip(*pairs("capitals"), strict=True)
    return (
        *words("spelled"),
        *words("colours"),
        *words("names"),
        *countries,
        *cities,
    )


def chat(rng: MaterialDraws) -> Question:
    talk = rng.choice(material().small_talk)
    text = rng.choice(talk["asks"])
    answer = rng.choice(talk["answers"])
    return Question(text, answer)


def capital(rng: MaterialDraws) -> Question:
    country, city = rng.pair("capitals")
    if rng.chance(0.15):
        capitalized = country[0].upper() + country[1:]
        return rng.question("country", city, country, capitalized)
    if rng.chance(0.08):
        country, city = rng.pair("capital_aliases")
    return rng.question("capital", country, city)


def spelling(rng: MaterialDraws) -> Question:
    word = rng.word("spelled")
    quotes = rng.choice(material().forms["quotes"])
    quoted = quotes.format(word)
    kind = rng.random()
    if kind < 0.45:
        return rng.question("spell", quoted, word, "-".join(word))
    if kind < 0.75:
        return reversed_word(rng, quotes)
    if kind < 0.9:
        return rng.question("letters", quoted, word, len(word))
    place = rng.choice(["first", "last"])
    letter = word[0] if place == "first" else word[-1]
    return rng.question("letter", place, quoted, word, letter)


def reversed_word(rng: MaterialDraws, quotes: str) -> Question:
    short_words = [word for word in words("spelled") if len(word) <= 5]
    word = rng.choice(short_words)
    quoted = quotes.format(word)
    letters = "-".join(reversed(word))
    return rng.question("reverse", quoted, word, letters)


def opposite(rng: MaterialDraws) -> Question:
    left, right = rng.pair("opposites")
    if rng.chance(0.5) and left not in words("one_way_opposites"):
        left, right = right, left
    quoted = rng.choice([left, left, f"'{left}'", f'"{left}"'])
    return rng.question("opposite", quoted, left, right)


def calendar(rng: MaterialDraws) -> Question:
    kind = rng.random()
    unit = "day" if rng.chance(0.5) else "month"
    group = "week" if unit == "day" else "year"
    names = words(f"{unit}s")
    index = rng.randrange(len(names))
    if kind < 0.5:
        return neighbour(rng, unit, index)
    if kind < 0.7:
        return month_length(rng)
    if kind < 0.94:
        return ordinal(rng, unit, group, index)
    text = rng.form("list", unit, group)
    answer = ", ".join(names)
    return Question(text, f"{answer}.")


def neighbour(rng: MaterialDraws, unit: str, index: int) -> Question:
    """Ask for the day or month before or after the one at `index`."""
    names = words(f"{unit}s")
    word = rng.choice(["after", "before"])
    step = 1 if word == "after" else -1
    other_index = (index + step) % len(names)
    other = names[other_index]
    return rng.question("neighbour", names[index], word, unit, other)


def month_length(rng: MaterialDraws) -> Question:
    month, days = rng.pair("month_days")
    leap_year = ", and 29 in a leap year" if month == "February" else ""
    return rng.question("days", month, leap_year, days)


def ordinal(rng: MaterialDraws, unit: str, group: str, index: int) -> Question:
    """Ask for the place of a day in the week or of a month in the year, or the reverse."""
    name = words(f"{unit}s")[index]
    nth = words("ordinals")[index]
    if rng.chance(0.3):
        text = f"Which {unit} of the {group} is {name}?"
        answer = f"{name} is the {nth} {unit} of the {group}."
        return Question(text, answer, nth)
    return rng.question("nth", nth, unit, group, name)


def small_fact(rng: MaterialDraws) -> Question:
    text, answer = rng.pair("facts")
    opening = rng.form("before a fact")
    return Question(opening + text, answer)


def swedish(rng: MaterialDraws) -> Question:
    source, target = translation(rng)
    language = "Swedish"
    if rng.chance(0.5):
        source, target = target, source
        language = "English"
    mark = ""
    if not source.endswith("?"):
        mark = rng.choice(["", "."])
    form = rng.choice(material().forms["translate"])
    if form.startswith("T"):
        source += mark
    if not target.endswith("?"):
        target += "."
    text = form.format(source, language)
    return Question(text, target)


def translation(rng: MaterialDraws) -> Translation:
    if rng.chance(0.4):
        phrase = rng.pair("swedish_phrases")
        return Translation(*phrase)
    return translated_sentence(rng)


def translated_sentence(rng: MaterialDraws) -> Translation:
    subject, swedish_subject = rng.pair("swedish_subjects")
    verbs, swedish_verb = rng.pair("swedish_verbs")
    noun, swedish_phrase = rng.pair("swedish_nouns")
    base, third_person = verbs.split("/")
    verb = third_person if subject in ("He", "She") else base
    article, swedish_noun = swedish_phrase.split()
    if not rng.chance(0.25):
        adjective, swedish_forms = rng.pair("swedish_adjectives")
        en_form, ett_form = swedish_forms.split()
        swedish_adjective = ett_form if article == "ett" else en_form
        noun = f"{adjective} {noun}"
        swedish_noun = f"{swedish_adjective} {swedish_noun}"
    english = f"{subject} {verb} a {noun}"
    swedish = f"{swedish_subject} {swedish_verb} {article} {swedish_noun}"
    return Translation(english, swedish)


def json_record(rng: MaterialDraws) -> Question:
    values = record_values(rng)
    record = rng.choice(material().records)
    keys = list(record["keys"])
    if rng.chance(0.25):
        rng.shuffle(keys)
    first_keys = ", ".join(keys[:-1])
    listed = f"{first_keys} and {keys[-1]}"
    form = rng.choice(material().forms["json"])
    described = rng.choice(record["texts"]).format(**values)
    text = form.format(listed, described)
    answer = dump({key: values[key] for key in keys})
    return Question(text, answer, answer, foldable=False)


def record_values(rng: MaterialDraws) -> dict[str, str | int]:
    """Return a value for every key that a JSON record may have."""
    values: dict[str, str | int] = {}
    values["name"] = rng.person()
    values["age"] = rng.randint(2, 95)
    values["city"] = rng.city()
    for key in ("job", "colour", "item"):
        values[key] = rng.word(f"{key}s")
    values["price"] = rng.randint(2, 99)
    return values


def echo(rng: MaterialDraws) -> Question:
    if rng.chance(0.5):
        return repeat(rng, rng.randint(1, 6))
    length = rng.choice([1, 2, 2, 3, 4])
    sayable = (*copied(), "hello", "hello", "hi")
    spoken = " ".join(rng.choices(sayable, k=length))
    text = rng.form("say", spoken)
    return Question(text, spoken, spoken, foldable=False)


def repeat(rng: MaterialDraws, length: int) -> Question:
    drawn = rng.choices(copied(), k=length)
    if rng.chance(0.3):
        drawn.append(rng.invented_name())
    spoken = " ".join(drawn)
    text = rng.form("repeat", spoken)
    return Question(text, f"You said: {spoken}", spoken, foldable=False)


def rehearsal(rng: MaterialDraws) -> Question:
    """Return an exercise with many words to copy, quote or spell, which every topic needs."""
    kind = rng.random()
    if kind < 0.45:
        return repeat(rng, rng.randint(3, 10))
    if kind < 0.75:
        return json_list(rng)
    length = rng.randint(2, 5)
    spelled = rng.choices(words("spelled"), k=length)
    text = ", ".join(spelled)
    answer = ", ".join("-".join(word) for word in spelled)
    return Question(f"Spell: {text}", answer, foldable=False)


def json_list(rng: MaterialDraws) -> Question:
    length = rng.randint(2, 7)
    items = rng.choices(copied(), k=length)
    items.append(rng.invented_name())
    rng.shuffle(items)
    text = ", ".join(items)
    return Question(f"Write as JSON: {text}", dump(items), foldable=False)


def unknown(rng: MaterialDraws) -> Question:
    """Return a question that the model cannot answer, and an answer that says so."""
    text = unknown_subject(rng)
    if rng.chance(0.1):
        name = rng.invented_name()
        text = f"What is the capital of {name}?"
    if rng.chance(0.1):
        return large_calculation(rng)
    answer = rng.form("unknown answer")
    return Question(text, answer)


def unknown_subject(rng: MaterialDraws) -> str:
    if rng.chance(0.5):
        return rng.form("unknown")
    thing = rng.word("spelled")
    name = rng.invented_name()
    subjects = [*words("unknown"), f"a {thing}", name]
    return rng.form("unknown subject", rng.choice(subjects))


def large_calculation(rng: MaterialDraws) -> Question:
    a = rng.randint(100, 9999)
    b = rng.randint(100, 9999)
    sign = rng.choice("+-*/")
    text = f"What is {a} {sign} {b}?"
    return Question(text, "I am a tiny demo model, I only know numbers below one hundred.")


def story(rng: MaterialDraws) -> Question:
    """Return a fixed plot with drawn words: 60 to 150 words, enough to watch a stream."""
    hero, friend = rng.sample(words("heroes"), 2)
    named = {"hero": hero, "friend": friend}
    named["name"] = rng.word("names")
    for key in ("trait", "place", "thing"):
        named[key] = rng.word(f"{key}s")
    kind = rng.weighted(STORY_KINDS)
    text = rng.form(kind, **named)
    plot = LONG_PLOT if kind == "long story" else PLOT
    sentences = [rng.form(part, **named) for part in plot]
    return Question(text, " ".join(sentences))


# Each topic and its relative weight.
TOPICS: dict[Callable[[MaterialDraws], Question], float] = {
    chat: 12,
    capital: 9,
    arithmetic: 18,
    compare: 4,
    counting: 9,
    spelling: 13,
    opposite: 5,
    calendar: 6,
    small_fact: 2,
    swedish: 8,
    json_record: 6,
    echo: 4,
    unknown: 6,
    story: 1.5,
}
