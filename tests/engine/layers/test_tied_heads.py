"""A checkpoint may store a copy of a head tied to the token embedding, if their values agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig, GPT2Config, LlamaConfig

from engine.errors import ConfigError
from tests.support.golden import Tensors, edit_checkpoint, load, of_transformers

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIGS = [
    LlamaConfig(**SMALL),
    GemmaConfig(**SMALL),
    Gemma2Config(**SMALL),
    Gemma3TextConfig(**SMALL),
    GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64),
]


def head(off: float) -> Any:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        (name,) = (n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
        tensors["lm_head.weight"] = tensors[name].clone()
        tensors["lm_head.weight"][3, 5] += off

    return edit


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_tied_head_equal_copy_loads_and_different_copy_is_refused(
    config: Any, tmp_path: Path
) -> None:
    of_transformers(config, tmp_path)
    edit_checkpoint(tmp_path, head(0.0))
    kept = load(tmp_path, prepack=False).model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.isfinite(tensor).all() for tensor in kept.values())
    edit_checkpoint(tmp_path, head(0.25))
    with pytest.raises(ConfigError, match=r"lm_head.weight .*differs from.*ties them"):
        load(tmp_path)
