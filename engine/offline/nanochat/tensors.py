"""Map upstream's tensors to the names in a served folder, with every tensor accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engine.errors import ConfigError, listed
from engine.offline.nanochat.checkpoint import ModelConfig
from engine.offline.nanochat.generation import SMEAR_CHANNELS, Generation, value_layers

TABLES = ("transformer.wte.", "lm_head.", "value_embeds.")  # with one row per token
PADDING = 64  # since 2025-12 the rows of TABLES are padded to a multiple of it


def served_tensors(
    file: Path,
    model: ModelConfig,
    generation: Generation,
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return views of the tensors, without the rows that only pad the vocabulary.

    Raises ConfigError naming a tensor that is missing, unexpected, or of another shape than the
    sizes in the meta file imply.
    """
    served, unclaimed = {}, dict(tensors)
    for name, new_name, shape in _layout(model, generation):
        if name not in unclaimed:
            raise ConfigError(f"{file} lacks {name}, expected with shape {list(shape)}.")
        tensor = unclaimed.pop(name)
        padded = (-(-shape[0] // PADDING) * PADDING, *shape[1:])
        if tensor.shape != shape and not (name.startswith(TABLES) and tensor.shape == padded):
            raise ConfigError(
                f"{name} in {file} has shape {list(tensor.shape)}; expected {list(shape)}."
            )
        served[new_name] = tensor[: shape[0]]
    if unclaimed:
        raise ConfigError(
            f"{file} holds {listed(sorted(unclaimed))}; nanochat from {generation.dates} "
            "has no such tensors."
        )
    return served


def _layout(
    model: ModelConfig, generation: Generation
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (upstream's name, served name, shape) of every tensor in a checkpoint."""
    width, vocabulary = model.n_embd, model.vocab_size
    kv_width = model.n_kv_head * (width // model.n_head)
    yield "transformer.wte.weight", "model.embed_tokens.weight", (vocabulary, width)
    yield "lm_head.weight", "lm_head.weight", (vocabulary, width)
    linears = {
        "attn.c_q": ("self_attn.q_proj", (width, width)),
        "attn.c_k": ("self_attn.k_proj", (kv_width, width)),
        "attn.c_v": ("self_attn.v_proj", (kv_width, width)),
        "attn.c_proj": ("self_attn.o_proj", (width, width)),
        "mlp.c_fc": ("mlp.fc1", (4 * width, width)),
        "mlp.c_proj": ("mlp.fc2", (width, 4 * width)),
    }
    for i in range(model.n_layer):
        for name, (new_name, shape) in linears.items():
            yield f"transformer.h.{i}.{name}.weight", f"model.layers.{i}.{new_name}.weight", shape
    for i in value_layers(model, generation):
        gate, table = "attn.ve_gate.weight", f"value_embeds.{i}.weight"
        gates = (model.n_kv_head, generation.gate_channels)
        yield f"transformer.h.{i}.{gate}", f"model.layers.{i}.self_{gate}", gates
        yield table, f"model.{table}", (vocabulary, kv_width)
    for name in ("resid_lambdas", "x0_lambdas") if generation.lambdas else ():
        yield name, f"model.{name}", (model.n_layer,)
    if generation.smear:
        yield "smear_gate.weight", "model.smear_gate.weight", (1, SMEAR_CHANNELS)
        yield "smear_lambda", "model.smear_lambda", (1,)
        yield "backout_lambda", "model.backout_lambda", (1,)
