"""Make the tokenizers of this folder again: `python -m tests.data.make [NAME …]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.data.vocabularies import byte_fallback, byte_level, unigram, wordpiece

FOLDER = Path(__file__).parent
TOKENIZERS = {
    "tokenizers/byte-level": byte_level,
    "tokenizers/wordpiece": wordpiece,
    "tokenizers/unigram": unigram,
    "checkpoints/drawn-llama": byte_fallback,
    "checkpoints/drawn-gpt2": byte_fallback,
}


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    for name in sys.argv[1:] or TOKENIZERS:
        TOKENIZERS[name]().save(str(FOLDER / name / "tokenizer.json"))


if __name__ == "__main__":
    main()
