"""Rules of the house that no linter knows."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from engine.models.registry import ARCHITECTURES

ENGINE = Path(__file__).resolve().parents[2] / "engine"
FILES = [ENGINE / "core.py", *ENGINE.glob("runner/*.py"), *ENGINE.glob("scheduling/*.py")]
NAMES = {module.rpartition(".")[2] for _, module, _ in ARCHITECTURES.values()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_engine_names_no_architecture(file: Path) -> None:
    """What is special about a model is in its file, or data in its AttentionSpec."""
    families = NAMES | {re.sub(r"(?<=..)[\d_]+$", "", name) for name in NAMES}  # but T5 is no t
    words = "|".join(sorted(families, key=len, reverse=True))
    found = re.findall(rf"(?i)(?<![a-z])(?:{words})", file.read_text(encoding="utf-8"))
    assert not found


def test_model_files_are_short() -> None:
    modules = {
        ENGINE.parent / f"{module.replace('.', '/')}.py" for _, module, _ in ARCHITECTURES.values()
    }
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in modules]
    assert statistics.median(lines) <= 150
    assert max(lines) <= 400
