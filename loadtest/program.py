"""How the programs `python -m loadtest.NAME` end on an error, and how they read files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import is_hub_name, model_folder
from engine.errors import ConfigError
from loadtest.errors import BenchError

BAD_ARGUMENTS = 2


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. A missing file, or one with other content, ends it with one line and status 2."""
    try:
        main()
    except (BenchError, ConfigError) as error:
        _end(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _end(f"{where}{error.strerror or error}")


def _end(message: str) -> None:
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    sys.stderr.write(f"{name}: {message}\n")
    raise SystemExit(BAD_ARGUMENTS)


def check_model(model: str) -> None:
    """Raise ConfigError unless MODEL is a model's folder, a GGUF file, or a name on the hub."""
    if not is_hub_name(model):
        model_folder(model)


def read_text(file: Path) -> str:
    """Return the text of a file. Raises BenchError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise BenchError(f"{file} is not a text in UTF-8.") from None


def read_lines(file: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a file, one a line. Raises BenchError if a line is none."""
    found: list[Mapping[str, Any]] = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise BenchError(f"Line {number} of {file} is not a JSON object.")
        found.append(value)
    return found
