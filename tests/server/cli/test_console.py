"""Messages of the server on a terminal."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from server.cli.console import say


def test_say_keeps_lines_and_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\x1b[31m\ntwo\r\u2028\x9b")
    assert capsys.readouterr().err == "one\\x1b[31m\ntwo\\r\\u2028\\x9b\n"


def test_config_error_is_one_line_for_each_problem() -> None:
    assert str(ConfigError("a\nb\x07")) == "a\\nb\\x07"
    assert str(ConfigError("a", "b")) == "a\nb"
