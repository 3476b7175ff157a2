"""The images of Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP, pixel shuffle.

A picture is cut into square tiles of the tower's size. The connector joins squares of neighbouring
patches into one embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from engine.checkpoint.image_config import HALF
from engine.checkpoint.weight_map import Names
from engine.errors import ConfigError
from engine.models.base import positive
from engine.models.vision import siglip
from engine.models.vision.block import TowerLinear, Units, in_parts, under
from engine.models.vision.pixels import Normalization, patches
from engine.models.vision.settings import normalization_of, vision_config
from engine.models.vision.siglip import SiglipConfig, SiglipTower
from engine.protocol.generate import Image

TOWER_DEFAULTS = siglip.DEFAULTS | {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "patch_size": 32,
}
NAMES = under(siglip.NAMES, "tower.", "vision_model.") | {
    "connector": "connector.modality_projection.proj"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3VisionConfig:
    tower: SiglipConfig
    scale: int  # patches along a side of the square that becomes one embedding
    hidden: int  # of the language model
    normalization: Normalization

    @classmethod
    def from_hf(cls, config: dict[str, Any], hidden: int) -> Idefics3VisionConfig:
        """Read config.json with the image processor's config as "image_processor".

        Raises ConfigError for an unsupported variant.
        """
        tower = SiglipConfig.from_hf(vision_config(config), TOWER_DEFAULTS)
        scale = positive(config, "scale_factor", 2)
        if tower.side % scale:
            raise ConfigError(
                f"config.json has scale_factor {scale}, which does not divide the {tower.side} "
                "patches of a tile's side."
            )
        normalization = normalization_of(config, HALF, HALF)
        return cls(tower=tower, scale=scale, hidden=hidden, normalization=normalization)


class Idefics3Vision(nn.Module):
    names: ClassVar[Names] = NAMES

    def __init__(self, config: Idefics3VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = config
        self.dtype, self.width = dtype, c.hidden
        self.tower = SiglipTower(c.tower)
        self.connector = TowerLinear(c.tower.hidden * c.scale**2, c.hidden)

    def encode(self, pixels: torch.Tensor, image: Image) -> Units:
        """Pixels uint8 [tiles, image_size, image_size, 3] -> embeddings [n, hidden]."""
        side = self.config.tower.side
        return in_parts(pixels, side**2, self._encode)

    def _encode(self, pixels: torch.Tensor) -> Units:
        c = self.config
        side = c.tower.side
        squares = patches(pixels, c.tower.patch_size)
        positions = bucketed_positions(side).to(pixels.device)
        numbers = c.normalization(squares, self.dtype).flatten(2)
        hidden = yield from self.tower.encode(numbers, positions)
        return self.connector(shuffled(hidden.unflatten(1, (side, side)), c.scale))


def bucketed_positions(side: int) -> torch.Tensor:
    """Return the rows [side * side] in the table of positions, for a tile of `side` patches a side.

    The reference counts the boundaries j / side that are not above i / side, in fp32. Rounding
    makes some patches share the row of their neighbour, and checkpoints are trained with that.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
    steps = torch.arange(side, dtype=torch.float32, device="cpu")
    fractions = (steps * (1.0 / torch.tensor(side, device="cpu"))).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(fractions, boundaries, right=True)
    return (buckets[:, None] * side + buckets).flatten()


def shuffled(hidden: torch.Tensor, scale: int) -> torch.Tensor:
    """Join squares of `scale` x `scale` patches: [tiles, H, W, N] -> [tokens, scale² * N]."""
    squares = hidden.unflatten(2, (-1, scale)).unflatten(1, (-1, scale))
    return squares.transpose(2, 3).flatten(3).flatten(0, 2)
