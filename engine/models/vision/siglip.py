"""SigLIP's vision tower (arXiv 2303.15343): a ViT without a class token, with learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from engine.errors import ConfigError
from engine.layers.embedding import TokenEmbedding
from engine.layers.mlp import ACTIVATIONS
from engine.layers.norm import LayerNorm
from engine.layers.span_attention import Spans
from engine.models.base import expect, layer_count, positive, positive_float, shared_by
from engine.models.vision.block import BlockShape, PatchEmbedding, Units, VisionBlock
from engine.models.vision.pixels import CHANNELS

# Our module name -> its name in a checkpoint, without the tower's prefix.
NAMES = {
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "blocks.{i}.attention_norm": "encoder.layers.{i}.layer_norm1",
    "blocks.{i}.qkv": "encoder.layers.{i}.self_attn.{part}_proj",
    "blocks.{i}.out": "encoder.layers.{i}.self_attn.out_proj",
    "blocks.{i}.mlp_norm": "encoder.layers.{i}.layer_norm2",
    "blocks.{i}.mlp.up": "encoder.layers.{i}.mlp.fc1",
    "blocks.{i}.mlp.down": "encoder.layers.{i}.mlp.fc2",
    "norm": "post_layernorm",
}
# The defaults of transformers: a nested vision_config omits values that equal them.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


HEAD = "head."  # the tensors of the pooling head, which vision-language models do not use


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    """The `vision_config` of a checkpoint with this tower."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.patch_size**2

    @property
    def side(self) -> int:
        """Patches along each side of a tile."""
        return self.image_size // self.patch_size

    @classmethod
    def from_hf(cls, config: dict[str, Any], defaults: Mapping[str, Any] = DEFAULTS) -> Self:
        """Read `vision_config`. Raises ConfigError for an unsupported variant."""
        given = dict(defaults) | config
        expect(given, "num_channels", CHANNELS)
        expect(given, "hidden_act", *ACTIVATIONS)
        hidden, heads = shared_by(given, "hidden_size", "num_attention_heads")
        image_size, patch_size = positive(given, "image_size"), positive(given, "patch_size")
        if image_size < patch_size:
            raise ConfigError(
                f"config.json has image_size {image_size}, which is below patch_size {patch_size}."
            )
        return cls(
            hidden=hidden,
            intermediate=positive(given, "intermediate_size"),
            layers=layer_count(given),
            heads=heads,
            image_size=image_size,
            patch_size=patch_size,
            activation=given["hidden_act"],
            norm_eps=positive_float(given, "layer_norm_eps"),
        )


class SiglipTower(nn.Module):
    """The tower without its pooling head, which vision-language models do not use.

    With `layers`, the hidden states are those after the first ones, without the last norm.
    """

    def __init__(self, config: SiglipConfig, *, layers: int | None = None) -> None:
        super().__init__()
        self.config = c = config
        norm = partial(LayerNorm, c.hidden, c.norm_eps)
        self.patches = PatchEmbedding(c.patch_numbers, c.hidden, bias=True)
        self.positions = TokenEmbedding(c.side**2, c.hidden)
        self.count = c.layers if layers is None else layers
        shape = BlockShape(
            hidden=c.hidden,
            intermediate=c.intermediate,
            heads=c.heads,
            activation=ACTIVATIONS[c.activation],
            norm=norm,
        )
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(self.count))
        self.norm = norm() if layers is None else None

    def encode(self, patches: torch.Tensor, positions: torch.Tensor | None = None) -> Units:
        """Patches [tiles, n, 3 * size²] -> hidden states [tiles, n, hidden].

        `positions` [n] are the patches' rows in the table of positions, by default one each.
        """
        embedded = self.embedded(patches, positions)
        tiles, count = embedded.shape[:2]
        x: torch.Tensor = embedded.flatten(0, 1)
        delta: torch.Tensor | None = None
        spans = Spans((count,) * tiles)
        for block in self.blocks:
            x, delta = yield from block(x, delta, spans, None)
        if self.norm is not None:
            x = self.norm.add(x, delta)[1]
        elif delta is not None:
            x = x + delta
        return x.view(tiles, count, -1)

    def embedded(self, patches: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return the embeddings of patches and their positions, [tiles, tokens, hidden]."""
        rows = self.positions.weight if positions is None else self.positions(positions)
        projected: torch.Tensor = self.patches(patches.flatten(0, 1))
        return projected.view(*patches.shape[:2], -1) + rows
