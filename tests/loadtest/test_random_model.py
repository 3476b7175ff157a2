"""Random checkpoints have the tensors that transformers' model of the same config has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from loadtest.random_model import LFM2_134M, LLAMA_125M, write_random_model
from loadtest.random_smolvlm import SCALE, TEXT, VISION, smolvlm_shapes

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LAYERS = {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96}


@pytest.mark.parametrize(
    "config",
    [LLAMA_125M | SMALL | HEADS, LFM2_134M | SMALL | HEADS | LAYERS],
    ids=["llama", "lfm2"],
)
def test_random_model_of_each_kind_loads_in_transformers(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    write_random_model(tmp_path, config)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [67, 68]  # a, b


def test_random_smolvlm_has_the_tensors_of_transformers() -> None:
    config = SmolVLMConfig(text_config=TEXT, vision_config=VISION, scale_factor=SCALE)
    with torch.device("meta"):
        model = SmolVLMForConditionalGeneration(config)
    expected = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    assert dict(smolvlm_shapes()) == expected
