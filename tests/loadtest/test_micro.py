"""The small measurements: their tables, bounds and turns, and that each case starts."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadtest.micro.__main__ import CASES, main
from loadtest.micro.case import Bound, Case, Table, in_turn
from loadtest.micro.speculation import prompts
from loadtest.program import run_program

SAMPLES = {"off": [10.0, 20.0, 30.0], "on": [20.0, 30.0, 30.0]}


def test_table_shows_the_ratios_of_each_way_to_the_base() -> None:
    table = Table(SAMPLES, "tokens/s", ("off",), notes={"on": "3 drafted"})
    lines = str(table).splitlines()
    assert lines[2] == "| off | 3 | 20 | 29.8 | 1.00 (1.00 to 1.00) |  |"
    assert lines[3] == "| on | 3 | 30 | 30 | 1.50 (1.00 to 2.00) | 3 drafted |"
    assert table.missed() == []


def test_table_names_a_bound_that_the_median_ratio_misses() -> None:
    kept = Bound("on", "off", 1.5)
    missed = Bound("on", "off", 1.4, at_most=True)
    table = Table(SAMPLES, "tokens/s", bounds=(kept, missed))
    assert table.missed() == [missed]
    assert str(table).count("MISSED") == 1


def test_in_turn_begins_each_round_with_another_way() -> None:
    order: list[str] = []

    def way(name: str, number: int) -> float:
        order.append(name)
        return float(number)

    ways = {name: lambda number, name=name: way(name, number) for name in "abc"}
    assert in_turn(ways, 2) == {name: [0.0, 1.0] for name in "abc"}
    assert order == ["a", "b", "c", "b", "c", "a"]


def test_prompts_of_speculation_have_three_kinds(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"turns": ["Why?"]}))
    found = list(prompts(file, 2))
    assert [prompt.kind for prompt in found] == ["copy", "copy", "edit", "edit", "free", "free"]
    assert all("guessed" in prompt.body["prompt"] for prompt in found[2:3])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the program; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["loadtest/micro/__main__.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_program(main)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("none",), "invalid choice: 'none'"),
        (("perplexity", "--model", "demo", "none.jsonl"), "micro: none.jsonl cannot be read: No"),
    ],
)
def test_micro_with_a_wrong_argument_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err


def test_micro_runs_a_case_and_prints_its_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_options(parser: ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int)

    def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
        stack.callback(print, "closed")
        for _ in range(options.rounds):
            yield Table(SAMPLES, "tokens/s", ("off",))

    monkeypatch.setitem(CASES, "example", Case("An example.", add_options, measure))
    assert run(monkeypatch, "example", "--rounds", "2") == 0
    said = capsys.readouterr().out
    assert said.count("| off | 3 | 20 |") == 2
    assert said.endswith("closed\n")


def test_every_case_says_what_it_measures() -> None:
    assert all(case.about.partition("\n")[0].endswith(".") for case in CASES.values())
