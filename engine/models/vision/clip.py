"""CLIP's vision tower (arXiv 2103.00020): SigLIP's with a class token and one more norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.layers.embedding import TokenEmbedding
from engine.layers.norm import LayerNorm
from engine.models.vision import siglip
from engine.models.vision.block import PatchEmbedding
from engine.models.vision.siglip import SiglipConfig, SiglipTower

NAMES = siglip.NAMES | {"start": "embeddings", "first_norm": "pre_layrnorm"}
DEFAULTS: dict[str, Any] = siglip.DEFAULTS | {
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


class ClassToken(nn.Module):
    """The learned token in front of a tile's patches."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(hidden))


class ClipTower(SiglipTower):
    """The hidden states after the first `layers` layers; those of the class token come first."""

    def __init__(self, config: SiglipConfig, *, layers: int) -> None:
        super().__init__(config, layers=layers)
        c = config
        self.patches = PatchEmbedding(c.patch_numbers, c.hidden, bias=False)
        self.start = ClassToken(c.hidden)
        self.positions = TokenEmbedding(1 + c.side**2, c.hidden)
        self.first_norm = LayerNorm(c.hidden, c.norm_eps)

    def embedded(self, patches: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        tiles = len(patches)
        projected = self.patches(patches.flatten(0, 1)).unflatten(0, patches.shape[:2])
        start = self.start.class_embedding.expand(tiles, 1, -1)
        return self.first_norm(torch.cat((start, projected), dim=1) + self.positions.weight)
