"""The images of LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326): tiles that a projector embeds.

A picture is one tile, or an overview and the tiles of the best of some resolutions. Embeddings of
the padding around the picture are cut away, and each row ends with the embedding of a new line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from engine.checkpoint.image_config import CLIP_MEAN, CLIP_STD
from engine.checkpoint.weight_map import Names
from engine.errors import ConfigError
from engine.layers.mlp import ACTIVATIONS
from engine.models.base import expect
from engine.models.vision import clip, siglip
from engine.models.vision.block import TowerLinear, Units, in_parts, under
from engine.models.vision.clip import ClipTower
from engine.models.vision.pixels import Normalization, patches
from engine.models.vision.settings import normalization_of, vision_config
from engine.models.vision.siglip import SiglipConfig, SiglipTower
from engine.ops.kernels import Kernels
from engine.protocol.generate import Image

Size = tuple[int, int]  # height and width
PROJECTOR = {
    "up": "multi_modal_projector.linear_1",
    "down": "multi_modal_projector.linear_2",
    "": "",
}
ONEVISION_TILES = re.compile(r"anyres_max_(\d+)")
MOST_OVER = 1.1  # a side this much too long is not shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaVisionConfig:
    tower: SiglipConfig
    is_clip: bool
    layers: int  # of the tower that are computed
    activation: str
    has_bias: bool
    most_tiles: int | None  # embeddings of more tiles are interpolated to fewer; None: they are not
    hidden: int  # of the language model
    normalization: Normalization

    @classmethod
    def of_next(cls, config: dict[str, Any], hidden: int) -> LlavaVisionConfig:
        """Read config.json of LLaVA-NeXT with the image processor's config as "image_processor".

        Raises ConfigError for an unsupported variant.
        """
        expect(config, "vision_feature_select_strategy", "default")  # without the class token
        tower = SiglipConfig.from_hf(_vision(config, "clip_vision_model"), clip.DEFAULTS)
        return cls(
            tower=tower,
            is_clip=True,
            layers=_layers(config.get("vision_feature_layer", -2), tower.layers),
            most_tiles=None,
            hidden=hidden,
            **_of_projector(config),
        )

    @classmethod
    def of_onevision(cls, config: dict[str, Any], hidden: int) -> LlavaVisionConfig:
        """Read config.json of LLaVA-OneVision, as `of_next` does."""
        expect(config, "vision_feature_select_strategy", "full")
        tower = SiglipConfig.from_hf(_vision(config, "siglip_vision_model"))
        ratio = config.get("vision_aspect_ratio", "anyres_max_9")
        tiles = ONEVISION_TILES.fullmatch(ratio) if isinstance(ratio, str) else None
        if tiles is None or int(tiles[1]) == 0:
            raise ConfigError(
                f"config.json has vision_aspect_ratio = {ratio!r:.40}; it must be anyres_max_ and "
                "a number."
            )
        return cls(
            tower=tower,
            is_clip=False,
            layers=_layers(config.get("vision_feature_layer", -1), tower.layers),
            most_tiles=int(tiles[1]),
            hidden=hidden,
            **_of_projector(config),
        )


def _vision(config: dict[str, Any], kind: str) -> dict[str, Any]:
    vision = vision_config(config)
    expect(vision, "model_type", kind)
    return vision


def _of_projector(config: dict[str, Any]) -> dict[str, Any]:
    expect(config, "projector_hidden_act", *ACTIVATIONS)
    return {
        "activation": config.get("projector_hidden_act", "gelu"),
        "has_bias": bool(config.get("multimodal_projector_bias", True)),
        "normalization": normalization_of(config, CLIP_MEAN, CLIP_STD),
    }


def _layers(feature_layer: Any, layers: int) -> int:
    """Return how many layers are computed: `vision_feature_layer` counts from the embeddings on."""
    if type(feature_layer) is not int or not -layers - 1 <= feature_layer <= layers:
        raise ConfigError(
            f"config.json has vision_feature_layer = {feature_layer!r:.40}; one layer of "
            f"{layers} is supported."
        )
    return feature_layer if feature_layer >= 0 else layers + 1 + feature_layer


class LlavaVision(nn.Module):
    names: ClassVar[Names] = under(siglip.NAMES, "tower.", "vision_tower.") | PROJECTOR
    clip_names: ClassVar[Names] = under(clip.NAMES, "tower.", "vision_tower.") | PROJECTOR

    def __init__(self, config: LlavaVisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = config
        self.dtype, self.width = dtype, c.hidden
        tower = ClipTower if c.is_clip else SiglipTower
        self.tower = tower(c.tower, layers=c.layers)
        self.up = TowerLinear(c.tower.hidden, c.hidden, bias=c.has_bias)
        self.down = TowerLinear(c.hidden, c.hidden, bias=c.has_bias)
        self.image_newline = nn.Parameter(torch.empty(c.hidden))
        self.kernels: Kernels = "torch"

    def encode(self, pixels: torch.Tensor, image: Image) -> Units:
        """Pixels uint8 [tiles, image_size, image_size, 3] -> embeddings [n, hidden].

        The overview is the first tile.
        """
        side = self.config.tower.side
        embedded = yield from in_parts(pixels, side**2, self._encode)  # [tiles, n, hidden]
        newline = self.image_newline
        if len(pixels) == 1:
            return torch.cat((embedded[0], newline[None]))
        squares = embedded[1:].view(*image.grid, side, side, -1)
        grid = squares.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [height, width, hidden]
        grid = self._shortened(unpadded(grid, image.size))
        lines = torch.cat((grid, newline.expand(len(grid), 1, -1)), dim=1)
        return torch.cat((embedded[0], lines.flatten(0, 1)))

    def _encode(self, pixels: torch.Tensor) -> Units:
        c = self.config
        squares = patches(pixels, c.tower.patch_size)
        hidden = yield from self.tower.encode(c.normalization(squares, self.dtype).flatten(2))
        if c.is_clip:
            hidden = hidden[:, 1:]
        inner = ACTIVATIONS[c.activation](self.up(hidden.flatten(0, 1)), self.kernels)
        return self.down(inner).unflatten(0, hidden.shape[:2])

    def _shortened(self, grid: torch.Tensor) -> torch.Tensor:
        """Interpolate a grid [height, width, hidden] of more embeddings than `most_tiles` have."""
        most = self.config.most_tiles
        if most is None:
            return grid
        height, width = grid.shape[:2]
        ratio = math.sqrt(height * width / (most * self.config.tower.side**2))
        if ratio <= MOST_OVER:
            return grid
        target = [int(height // ratio), int(width // ratio)]
        channels = grid.permute(2, 0, 1)[None]
        return F.interpolate(channels, target, mode="bilinear")[0].permute(1, 2, 0)


def unpadded(grid: torch.Tensor, size: Size) -> torch.Tensor:
    """Cut away the embeddings [height, width, hidden] of the padding around a picture of `size`."""
    height, width = grid.shape[:2]
    if size[1] / size[0] > width / height:
        padding = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return grid[padding : height - padding]
    padding = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return grid[:, padding : width - padding]
