"""The thoughts are right, and a higher effort says more."""

from __future__ import annotations

import re

import pytest

from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.practice_text import PracticeAuthor
from engine.offline.demo_training.thought_topics import (
    EFFORTS,
    Thought,
    ThoughtfulAnswer,
    draw_thoughtful,
)

EQUATION = re.compile(r"(\d+(?: [-+] \d+)+) = (\d+)")


def drawn(count: int = 1_500) -> list[ThoughtfulAnswer]:
    rng = MaterialDraws(11)
    return [draw_thoughtful(rng) for _ in range(count)]


def calculated(text: str) -> int:
    """Return the value of sums and differences such as "7 + 8 - 3"."""
    first, *rest = re.findall(r"[-+]? ?\d+", text)
    return int(first) + sum(int(number.replace(" ", "")) for number in rest)


def test_thought_contains_only_true_equations() -> None:
    equations = []
    for answer in drawn():
        equations += EQUATION.findall(answer.thought.written("high"))
    assert len(equations) > 1_000
    for sides in equations:
        assert calculated(sides[0]) == int(sides[1]), sides


def test_thought_about_letters_ends_with_their_number() -> None:
    counted = [answer for answer in drawn() if " letters." in answer.answer]
    assert counted
    for answer in counted:
        number = re.findall(r"\d+", answer.answer)[0]
        assert answer.thought.steps.endswith(f" {number}.")


def test_thought_of_higher_effort_contains_that_of_lower_effort() -> None:
    for answer in drawn():
        low, medium, high = [answer.thought.written(effort) for effort in EFFORTS]
        assert low
        assert low in medium
        assert medium in high
        assert len(high) > len(medium)


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("low", "Steps."), ("medium", "Opening. Steps."), ("high", "Opening. Steps. Check.")],
)
def test_thought_written_has_the_parts_of_its_effort(effort: str, expected: str) -> None:
    assert Thought("Opening.", "Steps.", "Check.").written(effort) == expected


def test_practice_conversation_with_effort_thinks_in_its_last_answer() -> None:
    author = PracticeAuthor(12, frozenset())
    for _ in range(1_000):
        conversation = author.compose()
        last = conversation.messages[-1]
        assert ("reasoning_content" in last) == (conversation.effort != "none")
