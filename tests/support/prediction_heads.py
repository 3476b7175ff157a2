"""Checkpoints with a prediction head, and the head's computation by transformers' layers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.golden import Tensors

HEAD = "mtp."
LAYER = "mtp.layers.0."


def add_head(config: dict[str, Any], tensors: Tensors, *, seed: int = 0) -> None:
    """Add the tensors `mtp.*` with random numbers: those of an attending layer, and its inputs."""
    hidden = config.get("text_config", config)["hidden_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    attending = next(name for name in tensors if name.endswith("self_attn.q_proj.weight"))
    layer = attending.removesuffix("self_attn.q_proj.weight")
    for name in [name for name in tensors if name.startswith(layer)]:
        tensors[LAYER + name.removeprefix(layer)] = random(*tensors[name].shape)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"{HEAD}{name}.weight"] = random(hidden)
    tensors[f"{HEAD}fc.weight"] = random(hidden, 2 * hidden)


def add_right_head(config: dict[str, Any], tensors: Tensors, *, added: float = 0.0) -> None:
    """Add a head that is right: always, if what the residual layers add is multiplied by 0.

    A token follows then from the one before it alone, and the head gets the embedding of that one.
    """
    add_head(config, tensors)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(added)
    hidden = len(tensors["mtp.norm.weight"])
    tensors["mtp.fc.weight"] = torch.eye(hidden, 2 * hidden)
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()


def add_often_right_head(config: dict[str, Any], tensors: Tensors) -> None:
    """Add a head that is right about a fifth of the time.

    The answers of the model still depend on all tokens: norms magnify what the layers add.
    """
    add_right_head(config, tensors, added=0.02)


class ReferenceHead:
    """The head of the checkpoint in `folder`, next to its model of transformers, in fp32."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        code = sys.modules[type(model).__module__]
        prefix = type(model).__name__.removesuffix("ForCausalLM")
        stored = load_file(folder / "model.safetensors")
        config = model.config
        attends = config.layer_types.index("full_attention")
        layer = getattr(code, f"{prefix}DecoderLayer")(config, attends).eval()
        names = [name for name in stored if name.startswith(LAYER)]
        layer.load_state_dict(
            _fused({name.removeprefix(LAYER): stored[name] for name in names}, layer)
        )
        self._model, self._layer, self._stored = model, layer, stored
        self._eps = config.rms_norm_eps

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self._stored[f"{HEAD}{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    @torch.inference_mode()
    def logits(self, tokens: list[int], drafted: list[int]) -> torch.Tensor:
        """Return the logits [1 + drafted, vocabulary] behind known `tokens` and behind each of
        the `drafted` ones."""
        model = self._model.model
        hidden = model(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state
        ids = list(tokens[1:])
        found = []
        for token in [*drafted, None]:
            out = self._hidden(ids, hidden)[:, -1:]
            found.append(self._model.lm_head(out)[0, 0])
            if token is not None:
                ids.append(token)
                hidden = torch.cat((hidden, out), dim=1)
        return torch.stack(found)

    def _hidden(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        model = self._model.model
        embedded = model.embed_tokens(torch.tensor([ids]))
        parts = [self._norm("pre_fc_norm_embedding", embedded)]
        parts.append(self._norm("pre_fc_norm_hidden", hidden))
        x = torch.cat(parts, dim=-1) @ self._stored["mtp.fc.weight"].T
        count = len(ids)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = model.rotary_emb(x, positions)
        out = self._layer(x, position_embeddings=angles, attention_mask=mask)
        return self._norm("norm", out[0] if isinstance(out, tuple) else out)


def _fused(tensors: Tensors, layer: nn.Module) -> Tensors:
    """Return a layer's tensors with experts in two tensors, as transformers keeps them."""
    if not hasattr(layer.mlp, "experts"):
        return tensors
    count = layer.mlp.experts.num_experts
    found = {name: each for name, each in tensors.items() if ".experts." not in name}

    def each_expert(part: str) -> list[torch.Tensor]:
        return [tensors[f"mlp.experts.{index}.{part}_proj.weight"] for index in range(count)]

    pairs = zip(each_expert("gate"), each_expert("up"), strict=True)
    found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    found["mlp.experts.down_proj"] = torch.stack(each_expert("down"))
    return found
