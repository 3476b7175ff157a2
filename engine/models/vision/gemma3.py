"""The images of Gemma 3 (arXiv 2503.19786): SigLIP, average pooling, a norm and a projection.

A picture, or a crop of it, is one square of the tower's size and always gives the same number of
embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from engine.checkpoint.image_config import HALF
from engine.checkpoint.weight_map import Names, Target
from engine.errors import ConfigError
from engine.layers.norm import OffsetRMSNorm
from engine.models.base import positive
from engine.models.vision import siglip
from engine.models.vision.block import TowerLinear, Units, in_parts, under
from engine.models.vision.pixels import Normalization, patches
from engine.models.vision.settings import normalization_of, vision_config
from engine.models.vision.siglip import SiglipConfig, SiglipTower
from engine.protocol.generate import Image

PROJECTOR = "multi_modal_projector."
PROJECTION = PROJECTOR + "mm_input_projection"
NAMES = under(siglip.NAMES, "tower.", "vision_tower.") | {
    "norm": PROJECTOR + "mm_soft_emb_norm",
    "projection": PROJECTION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3VisionConfig:
    tower: SiglipConfig
    pool: int  # patches along a side of the square that becomes one embedding
    hidden: int  # of the language model
    normalization: Normalization

    @classmethod
    def from_hf(cls, config: dict[str, Any], hidden: int) -> Gemma3VisionConfig:
        """Read config.json with the image processor's config as "image_processor".

        Raises ConfigError for an unsupported variant.
        """
        tower = SiglipConfig.from_hf(vision_config(config))
        tokens = positive(config, "mm_tokens_per_image", 256)
        side = math.isqrt(tokens)
        pool = tower.side // side
        if side**2 != tokens or not pool or tower.side // pool != side:
            raise ConfigError(
                f"config.json has mm_tokens_per_image {tokens}, which {tower.side} x {tower.side} "
                "patches cannot be pooled to."
            )
        normalization = normalization_of(config, HALF, HALF)
        return cls(tower=tower, pool=pool, hidden=hidden, normalization=normalization)


class Gemma3Vision(nn.Module):
    names: ClassVar[Names] = NAMES

    def __init__(self, config: Gemma3VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = config
        self.dtype, self.width = dtype, c.hidden
        self.tower = SiglipTower(c.tower)
        self.norm = OffsetRMSNorm(c.tower.hidden, c.tower.norm_eps)
        self.projection = TowerLinear(c.tower.hidden, c.hidden)

    def encode(self, pixels: torch.Tensor, image: Image) -> Units:
        """Pixels uint8 [crops, image_size, image_size, 3] -> embeddings [n, hidden]."""
        return in_parts(pixels, self.config.tower.side**2, self._encode)

    def _encode(self, pixels: torch.Tensor) -> Units:
        c = self.config
        squares = patches(pixels, c.tower.patch_size)
        hidden = yield from self.tower.encode(c.normalization(squares, self.dtype).flatten(2))
        grid = hidden.unflatten(1, (c.tower.side, c.tower.side)).permute(0, 3, 1, 2)
        pooled = F.avg_pool2d(grid, c.pool).permute(0, 2, 3, 1).flatten(0, 2)
        return self.projection(self.norm(pooled))


def with_projection(targets: dict[str, Target]) -> dict[str, Target]:
    """Return the targets with the projection's tensor as it is: [in, out], with another ending."""
    found = {}
    for name, target in targets.items():
        if name.endswith(PROJECTION + ".weight"):
            spelled = name.removesuffix(".weight") + "_weight"
            found[spelled] = replace(target, transpose=True)
        else:
            found[name] = target
    return found
