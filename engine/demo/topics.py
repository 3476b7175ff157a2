"""What the demo model can talk about: one function per topic, each drawing one question and its
answer.

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
from engine.demo.small_talk import SMALL_TALK
from engine.demo.stories import tell

UNKNOWN = "I am a tiny demo model, I do not know that."
HINT = "Try a capital, a sum, an opposite or a short story."


@dataclass(frozen=True)
class Ask:
    question: str
    answer: str
    brief: str = ""
    fold: bool = True


def held_out(a: int, b: int) -> bool:
    """Pairs of two-digit numbers that no training question adds or subtracts: about one in 23."""
    low, high = sorted((a, b))
    return low >= 10 and (31 * low + 17 * high) % 23 == 0


def chat(rng: Random) -> Ask:
    questions, answers = rng.choice(SMALL_TALK)
    return Ask(rng.choice(questions), rng.choice(answers))


def capital(rng: Random) -> Ask:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    forms = ["What is the capital of {}?"] * 4 + [
        "What's the capital of {}?", "Tell me the capital of {}.", "Capital of {}?",
        "Name the capital of {}.",
        "Which city is the capital of {}?", "Do you know the capital of {}?",
        "The capital of {} is?",
        "Can you tell me the capital of {}?", "What is the capital city of {}?",
        "Give me the capital of {}",
    ]  # fmt: skip
    if rng.random() < 0.15:
        name = country[0].upper() + country[1:]
        answer = f"{city} is the capital of {country}."
        forms = ["{} is the capital of which country?", "Which country has the capital {}?"]
        forms += ["What country is {} the capital of?"]
        return Ask(rng.choice(forms).format(city), answer, name)
    forms += ["What is the capital in {}?", "{} capital?", "I need the capital of {}."]
    if rng.random() < 0.08:
        country, city = rng.choice(list(facts.CAPITAL_ALIASES.items()))
    return Ask(rng.choice(forms).format(country), f"The capital of {country} is {city}.", city)


def number_pair(rng: Random) -> tuple[int, int]:
    while True:
        low, top = rng.choices([(10, 99), (0, 99), (0, 12)], [75, 20, 5])[0]
        a, b = rng.randint(low, top), rng.randint(low, top)
        if not held_out(a, b):
            return a, b


def arithmetic(rng: Random) -> Ask:
    a, b = number_pair(rng)
    kind = rng.random()
    if kind < 0.5:
        sign, result = "+", a + b
        forms = [
            "What is {} plus {}?",
            "Add {} and {}.",
            "What is the sum of {} and {}?",
            "How much is {} and {}?",
        ]
    elif kind < 0.9:
        if a < b and rng.random() < 0.9:
            a, b = b, a
        sign, result = "-", a - b
        forms = [
            "What is {} minus {}?",
            "How much is {} minus {}?",
            "Take {1} from {0}.",
            "Subtract {1} from {0}.",
        ]
    else:
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        sign, result = rng.choice("*x"), a * b
        forms = [
            "What is {} times {}?",
            "Multiply {} by {}.",
            "How much is {} times {}?",
            "{} times {}",
        ]
    plain = [
        "What is {} %s {}?",
        "{} %s {}",
        "{}%s{}",
        "{} %s {} = ?",
        "How much is {} %s {}?",
        "Calculate {} %s {}.",
    ]
    plain = ["What is {} %s {}?", "What's {} %s {}?", "Compute {} %s {}", "What is {}%s{}?", *plain]
    form = rng.choice(forms) if rng.random() < 0.45 else rng.choice(plain) % sign
    return Ask(form.format(a, b), f"{a} {sign} {b} = {result}.", str(result))


def compare(rng: Random) -> Ask:
    a, b = rng.sample(range(100), 2)
    large = rng.random() < 0.5
    word = rng.choice(["larger", "bigger", "greater"] if large else ["smaller", "less"])
    form = rng.choice(
        ["Which is {}, {} or {}?", "Which number is {}: {} or {}?", "What is {}, {} or {}?"]
    )
    result = max(a, b) if large else min(a, b)
    other = a + b - result
    sense = "larger" if large else "smaller"
    return Ask(form.format(word, a, b), f"{result} is {sense} than {other}.", str(result))


def counting(rng: Random) -> Ask:
    step, word = rng.choice(
        [(1, ""), (1, ""), (2, "twos"), (3, "threes"), (5, "fives"), (10, "tens")]
    )
    length = rng.randint(4, 12)
    start = rng.choice([1, rng.randint(0, 40)]) if step == 1 else step * rng.randint(0, 5)
    end = start + step * (length - 1)
    by = f" by {word}" if word else ""
    if rng.random() < 0.4:
        forms = [
            "Count down{2} from {1} to {0}.",
            "Count backwards{2} from {1} to {0}.",
            "Count{2} from {1} down to {0}.",
        ]
        if start == 1 and step == 1:
            forms += ["Count down from {1}.", f"Count down from {facts.NUMBER_WORDS[end - 1]}."] * 3
        listed = list(range(end, start - 1, -step))
    else:
        forms = [
            "Count{2} from {0} to {1}.",
            "Can you count{2} from {0} to {1}?",
            "Count up{2} from {0} to {1}",
        ]
        if start == 1 and step == 1:
            forms += ["Count to {1}.", f"Count to {facts.NUMBER_WORDS[end - 1]}."] * 3
        listed = list(range(start, end + 1, step))
    return Ask(rng.choice(forms).format(start, end, by), ", ".join(map(str, listed)))


def spelling(rng: Random) -> Ask:
    word = rng.choice(facts.WORDS)
    quoted = rng.choice(
        [word, word, f"'{word}'", f'"{word}"', f"the word {word}", f"the word '{word}'"]
    )
    dashed = "-".join(word)
    kind = rng.random()
    if kind < 0.45:
        forms = [
            "Spell {}.",
            "How do you spell {}?",
            "Can you spell {}?",
            "Spell out {}",
            "How is {} spelled?",
        ]
        return Ask(
            rng.choice(forms).format(quoted), f"The word {word} is spelled {dashed}.", dashed
        )
    if kind < 0.75:
        short = rng.choice([entry for entry in facts.WORDS if len(entry) <= 5])
        quoted = quoted.replace(word, short)
        forms = [
            "Reverse {}.",
            "Spell {} backwards.",
            "Write {} backwards.",
            "What is {} backwards?",
        ]
        answer = f"The word {short} backwards is {short[::-1]}."
        return Ask(rng.choice(forms).format(quoted), answer, short[::-1])
    if kind < 0.9:
        forms = [
            "How many letters are in {}?",
            "How many letters does {} have?",
            "Count the letters in {}.",
        ]
        return Ask(
            rng.choice(forms).format(quoted),
            f"The word {word} has {len(word)} letters.",
            str(len(word)),
        )
    place, letter = rng.choice([("first", word[0]), ("last", word[-1])])
    forms = ["What is the {} letter of {}?", "Which letter is {} in {}?"]
    answer = f"The {place} letter of {word} is {letter}."
    return Ask(rng.choice(forms).format(place, quoted), answer, letter)


def opposite(rng: Random) -> Ask:
    left, right = rng.choice(list(facts.OPPOSITES.items()))
    if rng.random() < 0.5 and left not in facts.ONE_WAY:
        left, right = right, left
    left = rng.choice([left, left, f"'{left}'", f'"{left}"'])
    forms = [
        "What is the opposite of {}?", "Opposite of {}?", "Give me the opposite of {}.",
        "The opposite of {} is?",
        "What's the opposite of {}?", "Tell me the opposite of {}.",
        "Which word is the opposite of {}?",
    ]  # fmt: skip
    answer = f"The opposite of {left.strip(chr(39) + chr(34))} is {right}."
    return Ask(rng.choice(forms).format(left), answer, right)


def calendar(rng: Random) -> Ask:
    kind = rng.random()
    names, noun = (facts.DAYS, "day") if rng.random() < 0.5 else (facts.MONTHS, "month")
    at = rng.randrange(len(names))
    if kind < 0.5:
        word, step = rng.choice([("after", 1), ("before", -1)])
        forms = [
            "What comes {1} {0}?",
            "Which {2} comes {1} {0}?",
            "What {2} comes {1} {0}?",
            "What {2} is {1} {0}?",
        ]
        other = names[(at + step) % len(names)]
        answer = f"{other} comes {word} {names[at]}."
        return Ask(rng.choice(forms).format(names[at], word, noun), answer, other)
    if kind < 0.7:
        forms = [
            "How many days does {} have?",
            "How many days are in {}?",
            "How many days are there in {}?",
        ]
        at = rng.randrange(12)
        month, days = facts.MONTHS[at], facts.MONTH_DAYS[at]
        leap = ", and 29 in a leap year" if at == 1 else ""
        return Ask(rng.choice(forms).format(month), f"{month} has {days} days{leap}.", str(days))
    if kind < 0.94:
        group = "week" if noun == "day" else "year"
        nth, name = facts.ORDINALS[at], names[at]
        answer = f"{name} is the {nth} {noun} of the {group}."
        if rng.random() < 0.3:
            return Ask(f"Which {noun} of the {group} is {name}?", answer, nth)
        forms = ["Which {1} is the {0}?", "What is the {0} {1} of the {2}?", "Which {1} is {0}?"]
        forms += ["Name the {0} {1} of the {2}.", "Which is the {0} {1} of the {2}?"]
        return Ask(rng.choice(forms).format(nth, noun, group), answer, name)
    forms = ["List the {}s of the {}.", "Name the {}s of the {}.", "What are the {}s of the {}?"]
    group = "week" if noun == "day" else "year"
    return Ask(rng.choice(forms).format(noun, group), ", ".join(names) + ".")


def small_fact(rng: Random) -> Ask:
    question, answer = rng.choice(list(facts.SMALL_FACTS.items()))
    prefix = rng.choice(["", "", "", "Do you know: ", "Tell me: ", "A question: "])
    return Ask(prefix + question, answer)


def swedish_sentence(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        return rng.choice(list(facts.SWEDISH_PHRASES.items()))
    subject, jag = rng.choice(list(facts.SWEDISH_SUBJECTS.items()))
    verbs, har = rng.choice(list(facts.SWEDISH_VERBS.items()))
    noun, (bil, article) = rng.choice(list(facts.SWEDISH_NOUNS.items()))
    verb = verbs[subject in ("He", "She")]
    if rng.random() < 0.25:
        return f"{subject} {verb} a {noun}", f"{jag} {har} {article} {bil}"
    adjective, forms = rng.choice(list(facts.SWEDISH_ADJECTIVES.items()))
    return (
        f"{subject} {verb} a {adjective} {noun}",
        f"{jag} {har} {article} {forms[article == 'ett']} {bil}",
    )


def swedish(rng: Random) -> Ask:
    english, svenska = swedish_sentence(rng)
    source, target, language = (english, svenska, "Swedish")
    if rng.random() < 0.5:
        source, target, language = svenska, english, "English"
    dot = "" if source.endswith("?") else rng.choice(["", "."])
    end = "" if target.endswith("?") else "."
    forms = [
        "Translate to {1}: {0}",
        "Translate into {1}: {0}",
        "How do you say '{0}' in {1}?",
        "{0} in {1}?",
    ]
    forms += ["Say '{0}' in {1}.", 'Translate "{0}" to {1}.', "What is '{0}' in {1}?"]
    form = rng.choice(forms[:2] * 3 + forms[2:])
    return Ask(form.format(source + (dot if "Translate" in form else ""), language), target + end)


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
    price = rng.randint(2, 99)
    sentences: list[tuple[dict[str, str | int], list[str]]] = [
        ({"name": name, "age": age},
         [f"{name} is {age} years old.", f"My name is {name} and I am {age} years old.",
          f"{name}, age {age}."]),
        ({"name": name, "age": age}, [f"I am {name} and I am {age}.",
         f"{name} turned {age} today."]),
        ({"name": name, "city": city}, [f"{name} lives in {city}.",
         f"My name is {name} and I live in {city}."]),
        ({"name": name, "age": age, "city": city},
         [f"{name} is {age} years old and lives in {city}."]),
        ({"name": name, "job": job}, [f"{name} works as a {job}.", f"{name} is a {job}."]),
        ({"name": name, "colour": colour}, [f"{name} likes the colour {colour}.",
         f"{name} loves {colour}."]),
        ({"item": item, "price": price}, [f"The {item} costs {price} dollars.",
         f"I paid {price} euros for a {item}."]),
    ]  # fmt: skip
    record, texts = rng.choice(sentences)
    keys = list(record)
    if rng.random() < 0.25:
        rng.shuffle(keys)
    listed = " and ".join([", ".join(keys[:-1]), keys[-1]])
    forms = ["Extract {0} as JSON: {1}", "Extract {0} as JSON: {1}", "Extract the {0} as JSON: {1}"]
    forms += ["Give me {0} as JSON: {1}", "Return JSON with {0}: {1}", "{1} Extract {0} as JSON."]
    answer = json.dumps({key: record[key] for key in keys}, ensure_ascii=False)
    return Ask(rng.choice(forms).format(listed, rng.choice(texts)), answer, answer, fold=False)


def echo(rng: Random) -> Ask:
    words = " ".join(rng.choices([*COPIED, *facts.COLOURS, "hello"], k=rng.choice([1, 2, 2, 3, 4])))
    if rng.random() < 0.5:
        return repeat(rng, rng.randint(1, 6))
    form = rng.choice(["Say {}.", "Say '{}'", 'Say "{}"', "Please say {}."])
    return Ask(form.format(words), words[0].upper() + words[1:] + ".", words)


COPIED = [*facts.WORDS, *facts.COLOURS, *facts.NAMES, *facts.CAPITALS, *facts.CAPITALS.values()]


def repeat(rng: Random, length: int) -> Ask:
    """Plain copying of `length` words: every other topic copies words of its question."""
    words = " ".join(rng.choices(COPIED, k=length))
    if rng.random() < 0.3:
        words = f"{words} {invented_name(rng)}"
    form = rng.choice(["Repeat: {}", "Repeat after me: {}", "Echo: {}"])
    return Ask(form.format(words), f"You said: {words}", words, fold=False)


def unknown(rng: Random) -> Ask:
    if rng.random() < 0.5:
        question = rng.choice(facts.UNKNOWN_QUESTIONS)
    else:
        subject = rng.choice(
            [*facts.UNKNOWN_SUBJECTS, f"a {rng.choice(facts.WORDS)}", invented_name(rng)]
        )
        forms = ["What is {}?", "Explain {}.", "Tell me about {}.", "What do you know about {}?"]
        forms += [
            "Who is {}?",
            "How does {} work?",
            "Write an essay about {}.",
            "Why is {} important?",
        ]
        question = rng.choice(forms).format(subject)
    if rng.random() < 0.1:
        question = f"What is the capital of {invented_name(rng)}?"
    if rng.random() < 0.1:
        a, b = rng.randint(100, 9999), rng.randint(100, 9999)
        sign = rng.choice(["+", "-", "*", "/"])
        return Ask(
            f"What is {a} {sign} {b}?",
            "I am a tiny demo model, I only know numbers below one hundred.",
        )
    return Ask(question, rng.choice([f"{UNKNOWN} {HINT}"]))


def story(rng: Random) -> Ask:
    return Ask(*tell(rng))


TOPICS: dict[str, tuple[Callable[[Random], Ask], float]] = {
    "chat": (chat, 10), "capital": (capital, 9), "arithmetic": (arithmetic, 24),
    "compare": (compare, 3),
    "counting": (counting, 6), "spelling": (spelling, 13), "opposite": (opposite, 5),
    "calendar": (calendar, 6),
    "fact": (small_fact, 2), "swedish": (swedish, 8), "json": (json_record, 6), "echo": (echo, 4),
    "unknown": (unknown, 6), "story": (story, 1.5),
}  # fmt: skip
