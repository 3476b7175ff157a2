"""What the demo model can talk about: each topic draws one question and its answer.

A topic is a pure function of its random generator. `Ask.brief` is the answer without its
sentence, for callers who ask for one word; `Ask.fold` says whether the question survives lower
case and lost punctuation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.demo import facts
from engine.demo.phrases import BEFORE_A_FACT, FORMS, RECORDS, SMALL_TALK, UNKNOWN_QUESTIONS
from engine.demo.stories import tell

UNKNOWN = ("I am a tiny demo model, I do not know that. "
           "Try a capital, a sum, an opposite or a short story.",)  # fmt: skip
TOO_LARGE = "I am a tiny demo model, I only know numbers below one hundred."
COPIED = [*facts.WORDS, *facts.COLOURS, *facts.NAMES, *facts.CAPITALS, *facts.CAPITALS.values()]


@dataclass(frozen=True)
class Ask:
    question: str
    answer: str
    brief: str = ""
    fold: bool = True


def form(rng: Random, kind: str, *values: object) -> str:
    """One of the ways to ask, filled in."""
    return rng.choice(FORMS[kind]).format(*values)


def held_out(a: int, b: int) -> bool:
    """Pairs of two-digit numbers that no training question adds or subtracts: about one in 23."""
    low, high = sorted((a, b))
    return low >= 10 and (31 * low + 17 * high) % 23 == 0


def chat(rng: Random) -> Ask:
    questions, answers = rng.choice(SMALL_TALK)
    return Ask(rng.choice(questions), rng.choice(answers))


def capital(rng: Random) -> Ask:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.15:
        name = country[0].upper() + country[1:]
        return Ask(form(rng, "country", city), f"{city} is the capital of {country}.", name)
    if rng.random() < 0.08:
        country, city = rng.choice(list(facts.CAPITAL_ALIASES.items()))
    return Ask(form(rng, "capital", country), f"The capital of {country} is {city}.", city)


def number_pair(rng: Random) -> tuple[int, int]:
    while True:
        low, top = rng.choices([(10, 99), (0, 99), (0, 12)], [75, 20, 5])[0]
        a, b = rng.randint(low, top), rng.randint(low, top)
        if not held_out(a, b):
            return a, b


def worked(a: int, b: int, sign: str) -> str:
    """A sum or a difference, digit by digit: "7 + 8 = 15, 3 + 4 + 1 = 8, so 37 + 48 = 85."."""
    result = a + b if sign == "+" else a - b
    if result < 0:
        return f"{a} - {b} is below zero, I do not know such numbers."
    if a < 10 and b < 10:
        return f"{a} {sign} {b} = {result}."
    (tens, ones), (more_tens, more_ones) = divmod(a, 10), divmod(b, 10)
    carry = ""
    if sign == "+":
        carry = " + 1" if ones + more_ones > 9 else ""
        last, first = ones + more_ones, tens + more_tens + bool(carry)
    else:
        if ones < more_ones:
            tens, ones = tens - 1, ones + 10
        last, first = ones - more_ones, tens - more_tens
    steps = f"{ones} {sign} {more_ones} = {last}, {tens} {sign} {more_tens}{carry} = {first}"
    return f"{steps}, so {a} {sign} {b} = {result}."


def arithmetic(rng: Random) -> Ask:
    a, b = number_pair(rng)
    kind, brief = rng.random(), ""
    if kind < 0.43:
        sign, answer, named = "+", worked(a, b, "+"), "plus"
    elif kind < 0.86:
        if a < b and rng.random() < 0.9:
            a, b = b, a
        sign, answer, named = "-", worked(a, b, "-"), "minus"
    else:
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        sign, brief, named = rng.choice("*x"), str(a * b), "times"
        answer = f"{a} {sign} {b} = {brief}."
    if rng.random() < 0.45:
        return Ask(form(rng, named, a, b), answer, brief)
    return Ask(form(rng, "arithmetic", a, sign, b), answer, brief)


def compare(rng: Random) -> Ask:
    a, b = rng.sample(range(100), 2)
    large = rng.random() < 0.5
    word = rng.choice(FORMS["larger" if large else "smaller"])
    result, other = (max(a, b), min(a, b)) if large else (min(a, b), max(a, b))
    sense = "larger" if large else "smaller"
    answer = f"{result} is {sense} than {other}."
    return Ask(form(rng, "compare", word, a, b), answer, str(result))


STEPS = ((1, ""), (1, ""), (2, " by twos"), (3, " by threes"), (5, " by fives"), (10, " by tens"))


def counting(rng: Random) -> Ask:
    step, by = rng.choice(STEPS)
    length = rng.randint(4, 12)
    start = rng.choice([1, rng.randint(0, 40)]) if step == 1 else step * rng.randint(0, 5)
    end = start + step * (length - 1)
    word = facts.NUMBER_WORDS[length - 1]
    down = rng.random() < 0.4
    kind = "count down" if down else "count"
    kind += " from one" if start == 1 and step == 1 else ""
    numbers = range(end, start - 1, -step) if down else range(start, end + 1, step)
    return Ask(form(rng, kind, start, end, by, word), ", ".join(map(str, numbers)))


def spelling(rng: Random) -> Ask:
    word = rng.choice(facts.WORDS)
    quotes = rng.choice(FORMS["quotes"])
    quoted, dashed = quotes.format(word), "-".join(word)
    kind = rng.random()
    if kind < 0.45:
        return Ask(form(rng, "spell", quoted), f"The word {word} is spelled {dashed}.", dashed)
    if kind < 0.75:
        short = rng.choice([entry for entry in facts.WORDS if len(entry) <= 5])
        turned = "-".join(reversed(short))
        answer = f"The word {short} backwards is {turned}."
        return Ask(form(rng, "reverse", quotes.format(short)), answer, turned)
    if kind < 0.9:
        answer = f"The word {word} has {len(word)} letters."
        return Ask(form(rng, "letters", quoted), answer, str(len(word)))
    place, letter = rng.choice([("first", word[0]), ("last", word[-1])])
    answer = f"The {place} letter of {word} is {letter}."
    return Ask(form(rng, "letter", place, quoted), answer, letter)


def opposite(rng: Random) -> Ask:
    left, right = rng.choice(list(facts.OPPOSITES.items()))
    if rng.random() < 0.5 and left not in facts.ONE_WAY:
        left, right = right, left
    quoted = rng.choice([left, left, f"'{left}'", f'"{left}"'])
    return Ask(form(rng, "opposite", quoted), f"The opposite of {left} is {right}.", right)


def calendar(rng: Random) -> Ask:
    kind = rng.random()
    weekly = rng.random() < 0.5
    names, noun, group = (facts.DAYS, "day", "week") if weekly else (facts.MONTHS, "month", "year")
    at = rng.randrange(len(names))
    name, nth = names[at], facts.ORDINALS[at]
    if kind < 0.5:
        word, step = rng.choice([("after", 1), ("before", -1)])
        other = names[(at + step) % len(names)]
        question = form(rng, "neighbour", name, word, noun)
        return Ask(question, f"{other} comes {word} {name}.", other)
    if kind < 0.7:
        at = rng.randrange(12)
        month, days = facts.MONTHS[at], facts.MONTH_DAYS[at]
        leap = ", and 29 in a leap year" if at == 1 else ""
        return Ask(form(rng, "days", month), f"{month} has {days} days{leap}.", str(days))
    if kind < 0.94:
        answer = f"{name} is the {nth} {noun} of the {group}."
        if rng.random() < 0.3:
            return Ask(f"Which {noun} of the {group} is {name}?", answer, nth)
        return Ask(form(rng, "nth", nth, noun, group), answer, name)
    return Ask(form(rng, "list", noun, group), ", ".join(names) + ".")


def small_fact(rng: Random) -> Ask:
    question, answer = rng.choice(list(facts.SMALL_FACTS.items()))
    return Ask(rng.choice(BEFORE_A_FACT) + question, answer)


def swedish_sentence(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        return rng.choice(list(facts.SWEDISH_PHRASES.items()))
    subject, jag = rng.choice(list(facts.SWEDISH_SUBJECTS.items()))
    verbs, har = rng.choice(list(facts.SWEDISH_VERBS.items()))
    noun, en_bil = rng.choice(list(facts.SWEDISH_NOUNS.items()))
    verb = verbs.split("/")[subject in ("He", "She")]
    article, bil = en_bil.split()
    if rng.random() < 0.25:
        return f"{subject} {verb} a {noun}", f"{jag} {har} {article} {bil}"
    adjective, both = rng.choice(list(facts.SWEDISH_ADJECTIVES.items()))
    svenska = f"{jag} {har} {article} {both.split()[article == 'ett']} {bil}"
    return f"{subject} {verb} a {adjective} {noun}", svenska


def swedish(rng: Random) -> Ask:
    source, target = swedish_sentence(rng)
    language = "Swedish"
    if rng.random() < 0.5:
        source, target, language = target, source, "English"
    dot = "" if source.endswith("?") else rng.choice(["", "."])
    end = "" if target.endswith("?") else "."
    chosen = rng.choice(FORMS["translate"])
    return Ask(chosen.format(source + dot * chosen.startswith("T"), language), target + end)


def invented_name(rng: Random) -> str:
    """A name no list holds, so that the model must copy rather than recall."""
    parts = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
    return "".join(parts).capitalize() + rng.choice(["", "", "n", "s", "r"])


def person(rng: Random) -> str:
    return invented_name(rng) if rng.random() < 0.2 else rng.choice(facts.NAMES)


def json_record(rng: Random) -> Ask:
    name, age = person(rng), rng.randint(2, 95)
    city = rng.choice(list(facts.CAPITALS.values()))
    job, colour, item = rng.choice(facts.JOBS), rng.choice(facts.COLOURS), rng.choice(facts.ITEMS)
    drawn: dict[str, str | int] = {
        "name": name, "age": age, "city": city, "job": job, "colour": colour, "item": item,
        "price": rng.randint(2, 99),
    }  # fmt: skip
    keys, texts = rng.choice(RECORDS)
    ordered = list(keys)
    if rng.random() < 0.25:
        rng.shuffle(ordered)
    listed = " and ".join([", ".join(ordered[:-1]), ordered[-1]])
    answer = json.dumps({key: drawn[key] for key in ordered}, ensure_ascii=False)
    chosen = rng.choice(FORMS["json"])
    text = rng.choice(texts).format(**drawn)
    return Ask(chosen.format(listed, text), answer, answer, fold=False)


def echo(rng: Random) -> Ask:
    if rng.random() < 0.5:
        return repeat(rng, rng.randint(1, 6))
    words = " ".join(rng.choices([*COPIED, "hello", "hello", "hi"], k=rng.choice([1, 2, 2, 3, 4])))
    return Ask(form(rng, "say", words), words, words, fold=False)


def repeat(rng: Random, length: int) -> Ask:
    words = " ".join(rng.choices(COPIED, k=length))
    if rng.random() < 0.3:
        words = f"{words} {invented_name(rng)}"
    return Ask(form(rng, "repeat", words), f"You said: {words}", words, fold=False)


def rehearsal(rng: Random) -> Ask:
    """Many words to copy, to quote or to spell: what every other topic needs, and nothing else."""
    kind = rng.random()
    if kind < 0.45:
        return repeat(rng, rng.randint(3, 10))
    if kind < 0.75:
        words = [*rng.choices(COPIED, k=rng.randint(2, 7)), invented_name(rng)]
        rng.shuffle(words)
        answer = json.dumps(words, ensure_ascii=False)
        return Ask(f"Write as JSON: {', '.join(words)}", answer, fold=False)
    words = rng.choices(facts.WORDS, k=rng.randint(2, 5))
    return Ask(f"Spell: {', '.join(words)}", ", ".join("-".join(word) for word in words))


def unknown(rng: Random) -> Ask:
    if rng.random() < 0.5:
        question = rng.choice(UNKNOWN_QUESTIONS)
    else:
        noun, name = f"a {rng.choice(facts.WORDS)}", invented_name(rng)
        question = form(rng, "unknown", rng.choice([*facts.UNKNOWN_SUBJECTS, noun, name]))
    if rng.random() < 0.1:
        question = f"What is the capital of {invented_name(rng)}?"
    if rng.random() < 0.1:
        a, b, sign = rng.randint(100, 9999), rng.randint(100, 9999), rng.choice("+-*/")
        return Ask(f"What is {a} {sign} {b}?", TOO_LARGE)
    return Ask(question, rng.choice(UNKNOWN))


def story(rng: Random) -> Ask:
    return Ask(*tell(rng))


TOPICS: dict[str, tuple[Callable[[Random], Ask], float]] = {
    "chat": (chat, 12), "capital": (capital, 9), "arithmetic": (arithmetic, 18),
    "compare": (compare, 4), "counting": (counting, 9), "spelling": (spelling, 13),
    "opposite": (opposite, 5), "calendar": (calendar, 6), "fact": (small_fact, 2),
    "swedish": (swedish, 8), "json": (json_record, 6), "echo": (echo, 4),
    "unknown": (unknown, 6), "story": (story, 1.5),
}  # fmt: skip
