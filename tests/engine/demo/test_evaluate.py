"""Probes behind long texts, and the judgement of a tool's report."""

from __future__ import annotations

from typing import Any

import pytest

from engine.offline.demo_training.evaluate import (
    judge,
    lengthened,
    long_text,
    read_probes,
    request_fields,
    tokenizer,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
QUESTION = {"role": "user", "content": "What is the capital of Norway?"}


def behind(place: str, tokens: int) -> dict[str, Any]:
    probe = {"messages": [QUESTION], "tools": [TOOL]}
    return probe | {"behind": {"place": place, "tokens": tokens}}


def count(text: str) -> int:
    return len(tokenizer().encode(text).ids)


@pytest.mark.parametrize("tokens", [1000, 11_000])
def test_long_text_has_its_number_of_tokens(tokens: int) -> None:
    assert abs(count(long_text(tokens)) - tokens) <= 3


def test_lengthened_probe_has_the_text_at_its_place() -> None:
    system = lengthened(behind("system", 1000))["messages"]
    assert system == [{"role": "system", "content": long_text(1000)}, QUESTION]
    (document,) = lengthened(behind("document", 1000))["messages"]
    assert document["content"] == f"{long_text(1000)}\n\n{QUESTION['content']}"


def test_lengthened_probe_behind_tools_has_them_and_the_rest_as_a_system_message() -> None:
    few = lengthened(behind("tools", 1000))
    assert few["messages"] == [QUESTION]
    assert few["tools"][-1] == TOOL
    many = lengthened(behind("tools", 8000))
    assert many["tools"] == few["tools"]
    system, question = many["messages"]
    assert question == QUESTION
    assert 4000 < count(system["content"]) < 5000


def test_probe_without_a_long_text_stays_as_it_is() -> None:
    probe = {"messages": [QUESTION]}
    assert lengthened(probe) is probe
    assert request_fields(probe) == probe


def test_probes_behind_long_texts_have_the_same_questions_at_each_length() -> None:
    questions: dict[str, list[Any]] = {}
    for probe in read_probes():
        if "behind" in probe:
            questions.setdefault(probe["topic"], []).append(probe["messages"])
    first, *others = questions.values()
    assert len(questions) == 5
    assert others == 4 * [first]


def test_judge_of_a_report_rejects_another_call() -> None:
    probe = {"match": "report", "expect": ["7 degrees"]}
    assert judge(probe, "Rain, 7 degrees in Oslo.<|im_end|>")
    assert not judge(probe, "It is cold.")
    assert not judge(probe, '7 degrees <tool_call>\n{"name": "f"}\n</tool_call>')
