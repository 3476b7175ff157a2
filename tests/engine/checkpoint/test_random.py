"""--load-format dummy needs only config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from tests.support.driver import Driver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_dummy_load_format_config_alone_generates_tokens(folder: Path) -> None:
    first, second = (Driver(folder, load_format="dummy", prepack=False) for _ in range(2))
    weights, again = (dict(d.runner.model.named_parameters()) for d in (first, second))  # type: ignore[attr-defined]
    assert first.loaded.facts.weight_bytes == 4 * sum(p.numel() for p in weights.values())
    for name, parameter in weights.items():
        assert torch.equal(parameter, again[name]), name
        assert parameter.std() > 0, name
    ids = [d.submit([5, 6, 7], 8) for d in (first, second)]
    first.run()
    second.run()
    assert len(first.tokens(ids[0])) == 8
    assert first.tokens(ids[0]) == second.tokens(ids[1])


def test_default_load_format_missing_weights_raises_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        Driver(folder)
