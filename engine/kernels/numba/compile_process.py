"""The process that compiles kernels: `python -m engine.kernels.numba.compile_process FOLDER`.

Its stdin has one line: the kernels as JSON. Several processes may have the same list, since each
compiles the kernels that no other has begun.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from engine.device.parent import die_with_parent
from engine.kernels.numba.compilers import READY
from engine.kernels.numba.machine_code import KernelStore


def main() -> int:
    """Compile what stdin lists; return 1 if Numba cannot be imported."""
    die_with_parent()
    try:
        importlib.import_module("engine.kernels.numba.compile")
    except ImportError as error:
        _say(" ".join(str(error).split()))  # one line
        return 1
    _say(READY)
    store = KernelStore(Path(sys.argv[1]))
    for name, *shape in json.loads(sys.stdin.readline() or "[]"):
        store.compile_if_free(name, *shape)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
