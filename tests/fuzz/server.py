"""A server for a target, and the exceptions that it logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, has_exception, serving


class Tracebacks(logging.Handler):
    """The log records with an exception: no request may cause one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if has_exception(record):
            self.found.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[Tracebacks]:
    """Collect the exceptions that servers log, and restore the level of the log."""
    root = logging.getLogger()
    level, tracebacks = root.level, Tracebacks()
    root.addHandler(tracebacks)
    try:
        yield tracebacks
    finally:
        root.removeHandler(tracebacks)
        root.setLevel(level)  # other tests read records of lower levels


def hello_engine() -> FakeEngine:
    """Return an engine that answers every request with "Hello"."""
    from tests.server.conftest import EOS, byte_tokenizer

    answer = [*byte_tokenizer().encode("Hello").ids, EOS]
    return FakeEngine(lambda request: answer)


@contextlib.asynccontextmanager
async def served(folder: Path, **fields: Any) -> AsyncIterator[tuple[Served, Tracebacks]]:
    """A server around `hello_engine`, and what it logs."""
    from tests.server.conftest import write_model

    model = write_model(folder / "tiny")
    with logged() as tracebacks:
        async with serving(hello_engine(), model, log_level="error", **fields) as running:
            yield running, tracebacks
