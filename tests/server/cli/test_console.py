"""Messages of the server on a terminal."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from server.cli.console import say, visible


def test_say_keeps_lines_and_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\x1b[31m\ntwo\r\u2028\x9b")
    assert capsys.readouterr().err == "one\\x1b[31m\ntwo\\r\\u2028\\x9b\n"


def test_config_error_is_one_line_for_each_problem() -> None:
    assert str(ConfigError("a\nb\x07")) == "a\\nb\\x07"
    assert str(ConfigError("a", "b")) == "a\nb"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9 \u65e5 \U0001f44d", "plain \u00e9 \u65e5 \U0001f44d"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("a\r\nb", "a\nb"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("over\rwritten", "over\\rwritten"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
    ],
)
def test_visible_shows_control_characters_except_line_breaks_and_tabs(
    text: str, shown: str
) -> None:
    assert visible(text) == shown
