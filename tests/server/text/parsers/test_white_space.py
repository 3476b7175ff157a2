"""White space around the marks of a format, as a chat template writes it."""

from __future__ import annotations

import time

import pytest

from server.text.parsers.formats import CallFormat, NamedCall
from server.text.parsers.white_space import with_white_space

FORMAT = CallFormat("x", NamedCall("#"), open="<c>", close="</c>", separator="S")


@pytest.mark.parametrize(
    ("answer", "opening", "close", "separator", "inside"),
    [
        ("<c>a#{}</c><c>b#{}</c>", "<c>", "</c>", "", "#"),
        ("<c>\na # {}\n</c>\n\n<c>\nb # {}\n</c>", "<c>\n", "\n</c>", "\n\n", " # "),
        ("<c>a#{}</c>", "<c>", "</c>", "S", "#"),
        ("<c>a#{}</c> and <c>b#{}</c>\t<c>", "<c>", "</c>", "\t", "#"),
        ("other", "<c>", "</c>", "S", "#"),
    ],
)
def test_marks_have_the_white_space_of_the_answer(answer, opening, close, separator, inside):
    found = with_white_space(FORMAT, answer)
    assert isinstance(found.body, NamedCall)
    marks = (found.open, found.close, found.separator, found.body.separator)
    assert marks == (opening, close, separator, inside)


@pytest.mark.variants(1)
@pytest.mark.parametrize("answer", [" " * 300_000, "</c>" * 100_000, "</c>" + "\n" * 300_000])
def test_hostile_answer_takes_linear_time(answer: str) -> None:
    began = time.monotonic()
    with_white_space(FORMAT, answer)
    assert time.monotonic() - began < 10  # it was hours
