"""Start a server with scripted answers as a process."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.process import ROOT, Process

PROGRAM = ROOT / "tests" / "support" / "scripted_engine.py"
MODEL = "tests/Scripted-1.5B"


def call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call, as the demo model writes it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def custom_call(name: str, text: str) -> str:
    """Return the text of a call of a custom tool with a grammar: its input is written as it is."""
    return f'<tool_call>\n{{"name": "{name}", "arguments":\n{text}'


@contextlib.contextmanager
def serving_script(
    folder: Path, turns: Sequence[str], plain: Sequence[str] = ("Done.",), **more: Any
) -> Iterator[Process]:
    """Yield a server that listens, with the answers of a Script (scripted_engine.py).

    `folder` gets its files. `more` are other fields of the Script.
    """
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": turns, "plain": plain, **more}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = Process([sys.executable, str(PROGRAM), str(script)], folder / "stderr", environment)
    try:
        server.wait_for("penstock .* serves")
        yield server
    finally:
        server.process.terminate()
        server.status()
