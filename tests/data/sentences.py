"""Record the vectors that sentence-transformers gives the cases of tests/support/sentence_cases.py.

Needs PyPI's sentence-transformers 6.2.0, which is not part of any extra:
`python -m tests.data.sentences`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.data.make import FOLDER, write
from tests.support.sentence_cases import CASES, TEXTS


def main() -> None:
    from sentence_transformers import SentenceTransformer

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            path = case.write(Path(folder, str(number)))
            model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
            vectors = model.encode(list(TEXTS), **case.encode)
            found[case.name] = [[float(f"{x:.7g}") for x in vector] for vector in vectors]
    write(FOLDER / "sentences.json", found)


if __name__ == "__main__":
    main()
