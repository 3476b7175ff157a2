"""The frame of commands that write a model folder: a progress bar, messages and exit statuses."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from engine.errors import ConfigError


def write_folder(title: str, work: Callable[[Callable[[float], None]], Sequence[str]]) -> int:
    """Run `work`, print the lines that it returns, and return the exit status.

    `work` gets a function for its progress, from 0 to 1. The status is 0 once the folder is in
    place, 2 if nothing was written (the reason is on stderr), and 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` clauses run
    columns = TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    try:
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("", total=1.0)
            lines = work(lambda share: bar.update(task, completed=share))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("penstock: stopped; nothing was written.\n")
        return 130
    for line in lines:
        sys.stderr.write(f"penstock: {line}\n")
    return 0
