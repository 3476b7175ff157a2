"""Record the scores that sentence-transformers gives tests/support/cross_encoder_cases.py.

Needs PyPI's sentence-transformers 6.2.0, which is not part of any extra:
`python -m tests.data.cross_encoders`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.data.make import FOLDER, write
from tests.support.cross_encoder_cases import CASES, PAIRS


def main() -> None:
    from sentence_transformers import CrossEncoder

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            path = case.write(Path(folder, str(number)))
            model = CrossEncoder(str(path), device="cpu", local_files_only=True)
            scores = [model.predict(pair) for pair in PAIRS]
            rows = np.array(scores, dtype=np.float64).reshape(len(PAIRS), -1)
            found[case.name] = [[float(f"{x:.7g}") for x in row] for row in rows]
    write(FOLDER / "cross_encoders.json", found)


if __name__ == "__main__":
    main()
