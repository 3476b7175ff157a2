"""The records: every value that is a text is in the question, or known to the model."""

from __future__ import annotations

import json
from typing import Any

from engine.offline.demo_training.material import MaterialDraws, pairs
from engine.offline.demo_training.practice_text import PracticeAuthor
from engine.offline.demo_training.record_topics import FORMS, Form, described, draw_form, introduced


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    return [value] if isinstance(value, str) else []


def drawn(count: int = 1_000) -> list[Form]:
    rng = MaterialDraws(13)
    return [draw_form(rng) for _ in range(count)]


def test_record_of_a_person_quotes_the_sentence() -> None:
    rng = MaterialDraws(14)
    for _ in range(500):
        for draw in (described, introduced):
            form = draw(rng)
            assert texts(form.values)
            for text in texts(form.values):
                assert text in form.text


def test_draw_form_has_different_keys_for_all_fields() -> None:
    forms = drawn()
    keys = {key for form in forms for key in form.values}
    assert len(keys) > 50
    assert len(FORMS) < len(keys)


def test_draw_form_about_a_capital_is_true() -> None:
    capitals = dict(pairs("capitals"))
    for form in drawn():
        country = form.values.get("country")
        name = form.values.get("name", form.values.get("capital"))
        if country in capitals and isinstance(name, str):
            assert name == capitals[country] or name == country


def test_practice_record_is_held_and_its_answer_is_json() -> None:
    author = PracticeAuthor(15, frozenset())
    held = [talk for talk in (author.compose() for _ in range(1_000)) if talk.is_held]
    assert held
    for conversation in held:
        assert isinstance(json.loads(conversation.messages[-1]["content"]), dict)
