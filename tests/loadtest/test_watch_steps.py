"""The measurement of what watching costs, with few requests."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import ExitStack

from loadtest.micro.watch_steps import CASE


def test_watch_steps_times_both_processes() -> None:
    parser = ArgumentParser()
    CASE.add_options(parser)
    options = parser.parse_args(["--sequences", "2", "--steps", "20"])
    with ExitStack() as stack:
        tables = [str(table) for table in CASE.measure(options, stack)]
    assert any("| 2 streams, engine process | 20 |" in table for table in tables)
