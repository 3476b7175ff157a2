"""Recorded outputs of all-MiniLM-L6-v2 (assets/embedding-snapshots)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

QUESTION, BEGINNING = "What is Deep Learning?", "Deep Learning is..."
THREE = [QUESTION, BEGINNING, QUESTION]
# The recording engine used the tanh form of GELU, the model uses the exact one. That difference
# stays below this tolerance.
TOLERANCE = 4e-3
# Snapshot -> (the texts of its rows, pooling); vectors are not normalised.
POOLED = {
    "bert_batch": (THREE, "mean"),
    "bert_single": ([QUESTION], "mean"),
    "bert_batch_pooled": (THREE, "cls"),
    "bert_single_pooled": ([QUESTION], "cls"),
}
RAW = {
    "bert_batch_raw": THREE,
    "bert_single_raw": [QUESTION],
}  # snapshot -> texts; a row per token of all texts


def snapshot(assets: Path, name: str) -> np.ndarray:
    """Return a snapshot [rows, 384], stored by insta as a YAML list of lists of numbers."""
    _, _, body = (
        (assets / "embedding-snapshots" / f"test_bert__{name}.snap").read_text().split("---\n", 2)
    )
    rows: list[list[float]] = []
    for line in body.splitlines():
        if line.startswith("- - "):
            rows.append([])
        rows[-1].append(float(line[4:]))
    return np.array(rows)
