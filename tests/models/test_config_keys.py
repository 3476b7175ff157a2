"""A key of config.json that changes what the reference computes changes ours, or is refused."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.registry import DECODERS
from tests.models.golden import randomise

pytestmark = pytest.mark.usefixtures("one_thread")
# Each file by the first of its names.
MODELS = {module.rpartition(".")[2]: name for name, (module, _) in reversed(DECODERS.items())}
# Who reads the file, and in what the reference computes: no facts of the model.
ABOUT_THE_FILE = {"model_type", "architectures", "transformers_version", "dtype"}
TOKENS = torch.arange(60)[None] * 3 % 200
ACTIVATIONS = "silu", "gelu", "gelu_pytorch_tanh", "relu"
EQUAL = 1e-3  # of logits of the order of 10


def reference(config: Any) -> tuple[int, torch.Tensor]:
    """How many parameters its model has, and its logits; the weights follow from their names."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model, config.hidden_size)
    with torch.inference_mode():
        return sum(p.numel() for p in model.parameters()), model(input_ids=TOKENS).logits


def others(value: Any) -> list[Any]:
    """Values that mean something else; none for lists and objects."""
    match value:
        case None:
            return [3, True, "x"]
        case bool():
            return [not value]
        case int() | float():
            return [2 * value if value > 0.01 else 0.5]
        case str():
            return [name for name in ACTIVATIONS if name != value]
    return []


@pytest.mark.parametrize("module", MODELS)
def test_no_key_is_passed_over(module: str) -> None:
    config = import_module(f"tests.models.test_{module}").config()
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    values, (path, attribute) = config.to_dict(), DECODERS[MODELS[module]]
    read = getattr(import_module(path), attribute).read_config
    facts, (parameters, logits) = read(values), reference(config)
    passed_over = 0
    for key in sorted(values.keys() - ABOUT_THE_FILE):
        for other in others(values[key]):
            changed = values | {key: other}
            with contextlib.suppress(ConfigError):
                if read(changed) != facts:
                    continue
                try:
                    count, found = reference(type(config)(**changed))
                except Exception:
                    continue  # the reference refuses it
                if count != parameters:
                    continue  # so does our loader: the tensors are others
                passed_over += 1
                assert torch.allclose(found, logits, rtol=0, atol=EQUAL), f"{key} = {other}"
    assert passed_over > 3, "dropout and the like change nothing"
