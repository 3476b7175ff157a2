"""Outputs of all-MiniLM-L6-v2: computed by transformers, or recorded from another engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.reference_data import located, reference

TRANSFORMERS, RECORDED = "transformers", "embedding-snapshots"
SOURCES = [TRANSFORMERS, reference(RECORDED)]
QUESTION, BEGINNING = "What is Deep Learning?", "Deep Learning is..."
THREE = [QUESTION, BEGINNING, QUESTION]
# transformers computes in float64. The recording engine used the tanh form of GELU, the model uses
# the exact one; that difference stays below the second tolerance.
TOLERANCES = {TRANSFORMERS: 1e-5, RECORDED: 4e-3}
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


def expected(source: str, name: str, model: Path) -> np.ndarray:
    """Return the outputs [rows, 384] of a snapshot's texts by one of SOURCES."""
    return computed(name, model) if source == TRANSFORMERS else snapshot(name)


def computed(name: str, model: Path) -> np.ndarray:
    """Return what transformers computes in float64 for the texts of a snapshot, each text alone."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertModel

    texts, pooling = POOLED.get(name) or (RAW[name], "none")
    encoder = BertModel.from_pretrained(model, dtype=torch.float64).eval()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    rows = []
    for text in texts:
        with torch.inference_mode():
            states = encoder(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        pooled = {"mean": states.mean(0, keepdim=True), "cls": states[:1], "none": states}
        rows.append(pooled[pooling].numpy())
    return np.concatenate(rows)


def snapshot(name: str) -> np.ndarray:
    """Return a snapshot [rows, 384], stored by insta as a YAML list of lists of numbers."""
    file = located(f"{RECORDED}/test_bert__{name}.snap")
    _, _, body = file.read_text().split("---\n", 2)
    rows: list[list[float]] = []
    for line in body.splitlines():
        if line.startswith("- - "):
            rows.append([])
        rows[-1].append(float(line[4:]))
    return np.array(rows)
