"""Where test data is: our own in tests/data, and other people's outside the repository.

The reference data is real checkpoints, tokenizers, templates and traces. It is not part of the
repository, because it has other licences. A test that uses it has the marker `assets`, and is
skipped with ABSENT where it is absent. Every property is also tested with our own data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.drawn_checkpoints import made

OWN = Path(__file__).resolve().parents[1] / "data"
ASSETS = Path(__file__).resolve().parents[3] / "shared" / "assets"
ABSENT = "needs the reference data, which is not part of the repository"


def located(name: str) -> Path:
    """Return the path of our own data of this name, or else of the reference data."""
    own = OWN / name
    if own.exists():
        return made(own) if own.parent == OWN / "checkpoints" else own
    if not ASSETS.is_dir():
        pytest.skip(ABSENT)
    return ASSETS / name


def reference(name: str, *values: Any, marks: Any = ()) -> Any:
    """Return a parameter that is the name of reference data, perhaps with further values."""
    return pytest.param(name, *values, id=name, marks=[pytest.mark.assets, *marks])


def references(pattern: str) -> list[Any]:
    """Return a parameter for each file of the reference data: its name below ASSETS.

    There is one, which is skipped, where the data is absent.
    """
    names = [str(file.relative_to(ASSETS)) for file in sorted(ASSETS.glob(pattern))]
    return [reference(name) for name in names or [pattern]]


def found(pattern: str) -> list[Path]:
    """Return our own files of this pattern, and those of the reference data where it is present."""
    return [*sorted(OWN.glob(pattern)), *sorted(ASSETS.glob(pattern))]


def hard_texts(name: str = "texts.json") -> list[str]:
    """Return texts that are hard to tokenize: ours, or those of one of llama.cpp's test files."""
    content = located(name).read_text(encoding="utf-8")
    if name.endswith(".json"):
        return json.loads(content)  # type: ignore[no-any-return]
    return content.split("\n__ggml_vocab_test__\n")[:-1]


BYTE_LEVEL, WORDPIECE, UNIGRAM = (
    f"tokenizers/{name}" for name in ("byte-level", "wordpiece", "unigram")
)
LLAMA, GPT2 = "checkpoints/drawn-llama", "checkpoints/drawn-gpt2"
# Checkpoints with the reference's greedy answers in expected.json.
PUBLISHED = "checkpoints/stories260K-llama", "checkpoints/stories280K-gpt2"
CHECKPOINTS = [LLAMA, GPT2, *map(reference, PUBLISHED)]
# For tests in many modes: `make test` computes only our own checkpoints in each mode.
CHECKPOINTS_IN_MODES = [
    LLAMA,
    GPT2,
    *(reference(name, marks=[pytest.mark.slow]) for name in PUBLISHED),
]
