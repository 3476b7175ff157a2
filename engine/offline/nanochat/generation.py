"""Infer the version of nanochat that wrote a checkpoint from its tensors; nothing records it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ConfigError
from engine.offline.nanochat.checkpoint import Checkpoint, ModelConfig

SMEAR_CHANNELS = 24
SOFTCAP = 15.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Constants of upstream's code in a period of time, which no checkpoint records."""

    dates: str
    lambdas: bool  # residual scalars, and windows
    smear: bool  # smear and backout
    gate_channels: int  # of the value embeddings; 0: no value embeddings
    gate_range: float
    rope_theta: float
    qk_scale: float
    short_window: Callable[[int], int]  # sequence_len -> how far back an S layer sees
    doubt: str = ""


def _half(sequence_len: int) -> int:
    return sequence_len // 2


def _part(divisor: int) -> Callable[[int], int]:
    """Return a function that divides sequence_len and rounds up to a multiple of 128.

    128 is the tile size of flash attention.
    """
    return lambda sequence_len: -(-sequence_len // divisor // 128) * 128


CAP_IN_DOUBT = (
    "final_logit_softcapping is 20.0 if the checkpoint is from 2026-03-03 or later, which its "
    "tensors do not show. In that case change config.json; greedy output is the same either way."
)
GENERATIONS = (
    Generation("2026-03-14 or later", True, True, 12, 3.0, 100_000.0, 1.2, _part(4)),
    Generation("2026-03-09 to 03-13", True, False, 12, 3.0, 100_000.0, 1.15, _part(3)),
    Generation("2026-01-16 to 03-08", True, False, 32, 2.0, 10_000.0, 1.0, _half, CAP_IN_DOUBT),
    Generation("2026-01-11 to 01-15", True, False, 0, 0.0, 10_000.0, 1.0, _half),
    Generation("2025", False, False, 0, 0.0, 10_000.0, 1.0, _half),
)


def generation_of(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> Generation:
    """Return the generation that matches the tensors. Raises ConfigError if none does."""
    gates = (tensor for name, tensor in tensors.items() if name.endswith(".attn.ve_gate.weight"))
    columns = next((gate.shape[-1] for gate in gates), 0)
    lambdas, smear = "resid_lambdas" in tensors, "smear_gate.weight" in tensors
    for known in GENERATIONS:
        if (lambdas, smear, columns) == (known.lambdas, known.smear, known.gate_channels):
            return known
    raise ConfigError(
        f"{checkpoint.weights} matches no known nanochat: it has {'' if lambdas else 'no '}"
        f"resid_lambdas, {'' if smear else 'no '}smear_gate.weight and value gates of {columns} "
        f"channels; supported: nanochat from {', '.join(g.dates for g in GENERATIONS)}."
    )


def served_config(
    model: ModelConfig, generation: Generation, compute: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json in two parts: values stored in the checkpoint, and inferred values.

    Together they have every key that engine/models/nanochat.py reads. `compute` is the dtype of
    the training.
    """
    sizes = {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": model.vocab_size,
        "hidden_size": model.n_embd,
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.n_kv_head,
        "intermediate_size": 4 * model.n_embd,
        "max_position_embeddings": model.sequence_len,
        "hidden_act": "relu2",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    facts = {
        "dtype": str(compute).removeprefix("torch."),
        "rms_norm_eps": torch.finfo(compute).eps,
        "rope_theta": generation.rope_theta,
        "final_logit_softcapping": SOFTCAP,
        "qk_scale": generation.qk_scale,
        "layer_windows": layer_windows(model, generation),
        "residual_lambdas": generation.lambdas,
        "value_layers": value_layers(model, generation),
        "value_gate_channels": generation.gate_channels or None,
        "value_gate_range": generation.gate_range or None,
        "smear_channels": SMEAR_CHANNELS if generation.smear else None,
        "backout_layer": model.n_layer // 2 if generation.smear else None,
    }
    return sizes, facts


def layer_windows(model: ModelConfig, generation: Generation) -> list[int | None]:
    """Return the number of keys that a query of each layer sees, its own included.

    A letter of the pattern says how far back the layer sees. The last layer is always long. Layers
    of generations without patterns see all keys (None).
    """
    if not generation.lambdas:
        return [None] * model.n_layer
    back = {"L": model.sequence_len, "S": generation.short_window(model.sequence_len)}
    tiled = (model.window_pattern or "L").upper() * model.n_layer
    return [back[letter] + 1 for letter in tiled[: model.n_layer - 1] + "L"]


def value_layers(model: ModelConfig, generation: Generation) -> list[int]:
    """Return the layers with value embeddings: none, or every other layer including the last."""
    first = (model.n_layer - 1) % 2
    return list(range(first, model.n_layer, 2)) if generation.gate_channels else []
