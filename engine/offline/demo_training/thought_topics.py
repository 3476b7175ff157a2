"""Questions that the demo model answers after a thought: `<think>`, steps, `</think>`, answer.

A thought of low effort has the steps, one of medium effort says first what is needed, and one of
high effort ends with a check.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from engine.offline.demo_training.material import MaterialDraws, Question, words
from engine.offline.demo_training.number_topics import (
    arithmetic,
    compare,
    counting,
    worked_difference,
    worked_sum,
)
from engine.offline.demo_training.topics import (
    calendar,
    capital,
    chat,
    json_record,
    opposite,
    small_fact,
    spelling,
    swedish,
    unknown,
)

EFFORTS = {
    "low": 1,
    "medium": 2,
    "high": 1,
}
CALCULATION = re.compile(r"(\d+) ([-+*x]) (\d+) = (\d+)\.$")
WORD = re.compile(r"(?:The word|of) (\w+)( backwards is| is spelled| has| is)")
NEIGHBOUR = re.compile(r"\w+ comes (?:before|after) (\w+)\.")
SURE = "I am sure."


class Thought(NamedTuple):
    opening: str  # what is needed
    steps: str
    check: str = SURE

    def written(self, effort: str) -> str:
        """Return the thought of one effort: low, medium or high."""
        if effort == "low":
            return self.steps or self.opening
        parts = [self.opening, self.steps]
        if effort == "high":
            parts.append(self.check)
        return " ".join(part for part in parts if part)


class ThoughtfulAnswer(NamedTuple):
    question: Question
    thought: Thought
    answer: str


def draw_thoughtful(rng: MaterialDraws) -> ThoughtfulAnswer:
    """Return a question, the thought about it and the answer."""
    topic = rng.weighted(THOUGHTFUL)
    question = topic(rng)
    opening = OPENINGS[topic]
    if topic is arithmetic:
        return calculated(question, opening)
    if topic is compare:
        return ThoughtfulAnswer(question, Thought(opening, compared(question)), question.answer)
    if topic is spelling:
        return ThoughtfulAnswer(question, Thought(opening, spelled(question)), question.answer)
    steps = listed(question) if topic is calendar else ""
    return ThoughtfulAnswer(question, Thought(opening, steps), question.answer)


def calculated(question: Question, opening: str) -> ThoughtfulAnswer:
    """Move the digits of a worked calculation into the thought."""
    found = CALCULATION.search(question.answer)
    if found is None:
        return ThoughtfulAnswer(question, Thought(opening, ""), question.answer)
    a, b, result = int(found[1]), int(found[3]), int(found[4])
    steps, is_worked, _ = question.answer.rpartition(", so ")
    if is_worked:
        steps += "."
    if found[2] in "*x":
        multiples = [str(b * count) for count in range(1, a + 1)]
        steps = f"{', '.join(multiples)}."
        check = SURE
    elif found[2] == "+":
        check = f"Check: {worked_difference(result, b)}"
    else:
        check = f"Check: {worked_sum(result, b)}"
    return ThoughtfulAnswer(question, Thought(opening, steps, check), found[0])


def compared(question: Question) -> str:
    """Return the tens and ones of both numbers."""
    numbers = [int(number) for number in re.findall(r"\d+", question.answer)]
    parts = []
    for number in sorted(numbers):
        tens, ones = divmod(number, 10)
        parts.append(f"{number}: {tens} tens, {ones} ones.")
    return " ".join(parts)


def spelled(question: Question) -> str:
    """Return the letters of the word, numbered if they are counted."""
    found = WORD.search(question.answer)
    if found is None or found[2] == " is spelled":
        return ""
    word = found[1]
    if found[2] != " has":
        return f"{'-'.join(word)}."
    numbered = [f"{letter} {number}" for number, letter in enumerate(word, 1)]
    return f"{', '.join(numbered)}."


def listed(question: Question) -> str:
    """Return the day or month between its neighbours."""
    found = NEIGHBOUR.fullmatch(question.answer)
    if found is None:
        return ""
    kind = "days" if found[1] in words("days") else "months"
    names = words(kind)
    index = names.index(found[1])
    return f"{names[index - 1]}, {names[index]}, {names[(index + 1) % len(names)]}."


# Each topic with a thought, and its relative weight.
THOUGHTFUL: dict[Callable[[MaterialDraws], Question], float] = {
    arithmetic: 32,
    spelling: 20,
    compare: 8,
    calendar: 9,
    capital: 8,
    opposite: 6,
    counting: 4,
    chat: 4,
    unknown: 4,
    small_fact: 3,
    swedish: 4,
    json_record: 3,
}
OPENINGS: dict[Callable[[MaterialDraws], Question], str] = {
    arithmetic: "I have to calculate.",
    spelling: "I need the letters of the word.",
    compare: "I compare the tens, then the ones.",
    calendar: "I need the calendar.",
    capital: "I need a capital or its country.",
    opposite: "I need the opposite of a word.",
    counting: "I have to count.",
    chat: "The user wants to talk.",
    unknown: "I do not know this.",
    small_fact: "I need a small fact.",
    swedish: "I have to translate.",
    json_record: "I have to write JSON.",
}
