"""A config.json key that changes the reference's results changes ours too, or is refused."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.registry import DECODERS, ENCODERS
from tests.support.golden import randomise

pytestmark = pytest.mark.usefixtures("one_thread")
# Module of a model -> the first architecture that it serves.
SERVED = DECODERS | ENCODERS
SEEING = {
    "engine.models.idefics3",
    "engine.models.llava",
    "engine.models.qwen2_5_vl",
    "engine.models.qwen3_vl",
}  # their keys are those of a text model, and of a tower
MODELS = {module.rpartition(".")[2]: name for name, (module, _) in reversed(SERVED.items())}
MODELS = {name: served for name, served in MODELS.items() if f"engine.models.{name}" not in SEEING}
# Keys that name the file's reader or the reference's dtype, not properties of the model.
ABOUT_THE_FILE = {"model_type", "architectures", "transformers_version", "dtype"}
TOKENS = torch.arange(50)[None] * 3 % 200
ACTIVATIONS = "silu", "gelu", "gelu_pytorch_tanh", "relu"
EQUAL = 1e-3  # of logits of the order of 10, or hidden states of the order of 1


def reference(config: Any, architecture: str) -> tuple[int, torch.Tensor]:
    """Return the reference's parameter count and its results with seeded random weights.

    These are logits, or an encoder's hidden states.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModel if architecture in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.requires_grad = True  # a file has tables of sinusoids, too
    randomise(model, config.hidden_size)
    with torch.inference_mode():
        found = model(input_ids=TOKENS)
    results = found.last_hidden_state if architecture in ENCODERS else found.logits
    return sum(p.numel() for p in model.parameters()), results


def others(value: Any) -> list[Any]:
    """Return other values for a key; none for lists and objects."""
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
@pytest.mark.variants(6)
def test_read_config_changed_key_is_read_or_refused(module: str) -> None:
    config = import_module(f"tests.engine.models.test_{module}").config()
    architecture = MODELS[module]
    if architecture in DECODERS:
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    values, (path, attribute) = config.to_dict(), SERVED[architecture]
    read = getattr(import_module(path), attribute).read_config
    facts, (parameters, results) = read(values), reference(config, architecture)
    passed_over = 0
    for key in sorted(values.keys() - ABOUT_THE_FILE):
        for other in others(values[key]):
            changed = values | {key: other}
            with contextlib.suppress(ConfigError):
                if read(changed) != facts:
                    continue
                try:
                    count, found = reference(type(config)(**changed), architecture)
                except Exception:
                    continue  # the reference refuses it
                if count != parameters:
                    continue  # our loader refuses it, because the tensors do not fit
                passed_over += 1
                assert torch.allclose(found, results, rtol=0, atol=EQUAL), f"{key} = {other}"
    assert passed_over > 3, "keys such as dropout change nothing"
