"""all-MiniLM-L6-v2: the hidden states of every token against transformers and snapshots."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from server.text.load_tokenizer import load_tokenizer
from tests.support.encoders import hidden_states
from tests.support.golden import load
from tests.support.snapshots import RAW, RECORDED, SOURCES, TOLERANCES, TRANSFORMERS, expected

pytestmark = pytest.mark.usefixtures("one_thread")


def differences(
    folder: Path, source: str, dtype: str, model: Path
) -> dict[str, tuple[float, float]]:
    """Return, per snapshot, the largest difference and the smallest cosine of a token's states.

    `source` computed the states of `model`.
    """
    runner, tokenizer = load(folder, dtype=dtype), load_tokenizer(folder)
    found = {}
    for name, texts in RAW.items():
        states = torch.cat(hidden_states(runner, [tokenizer.encode(text) for text in texts]))
        ours, theirs = states.float().numpy(), expected(source, name, model)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines = (ours * theirs).sum(1) / lengths
        found[name] = float(np.abs(ours - theirs).max()), float(cosines.min())
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_minilm_hidden_states_match_the_source(minilm: Path, source: str) -> None:
    for name, (difference, cosine) in differences(minilm, source, "float32", minilm).items():
        assert difference < TOLERANCES[source], name
        assert cosine > 0.99999, name


@pytest.mark.parametrize("source", SOURCES)
def test_minilm_hidden_states_in_bfloat16_match_the_source(minilm: Path, source: str) -> None:
    for name, (difference, cosine) in differences(minilm, source, "bfloat16", minilm).items():
        assert difference < 0.1, name
        assert cosine > 0.9995, name


@pytest.mark.parametrize("source", SOURCES)
def test_minilm_with_tanh_gelu_equals_the_source(minilm: Path, tmp_path: Path, source: str) -> None:
    folder = tmp_path / "tanh"
    shutil.copytree(minilm, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    config = json.loads((minilm / "config.json").read_text()) | {"hidden_act": "gelu_new"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    difference, _ = differences(folder, source, "float32", folder)["bert_batch_raw"]
    assert difference < {TRANSFORMERS: 1e-5, RECORDED: 5e-5}[source]
