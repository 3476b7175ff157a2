"""The images of Qwen2.5-VL (arXiv 2502.13923): attention in windows, except in few layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from engine.checkpoint.image_config import CLIP_MEAN, CLIP_STD
from engine.checkpoint.weight_map import Names
from engine.errors import ConfigError
from engine.layers.mlp import GATED
from engine.layers.norm import RMSNorm
from engine.layers.span_attention import Spans
from engine.models.base import expect, positive
from engine.models.vision.block import BlockShape, Units, VisionBlock
from engine.models.vision.pixels import Normalization
from engine.models.vision.qwen_grid import (
    EPS,
    Grid,
    Merger,
    QwenTowerConfig,
    angles_at,
    in_frames,
    patch_embedding,
    picture_patches,
)
from engine.models.vision.settings import normalization_of, vision_config
from engine.protocol.generate import Image

NAMES = {
    "patches": "patch_embed.proj",
    "blocks.{i}.attention_norm": "blocks.{i}.norm1",
    "blocks.{i}.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.out": "blocks.{i}.attn.proj",
    "blocks.{i}.mlp_norm": "blocks.{i}.norm2",
    "blocks.{i}.mlp.up": "blocks.{i}.mlp.{part}_proj",
    "blocks.{i}.mlp.down": "blocks.{i}.mlp.down_proj",
    "norm": "merger.ln_q",
    "merger.up": "merger.mlp.0",
    "merger.down": "merger.mlp.2",
}
# The defaults of transformers.
DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VisionConfig(QwenTowerConfig):
    window: int  # embeddings along a side of a window
    full_layers: frozenset[int]  # whose attention has no windows
    normalization: Normalization

    @classmethod
    def read(cls, config: dict[str, Any]) -> Qwen25VisionConfig:
        """Read config.json with the image processor's config as "image_processor".

        Raises ConfigError for an unsupported variant.
        """
        given = DEFAULTS | vision_config(config)
        expect(given, "hidden_act", *GATED)
        unit = positive(given, "patch_size") * positive(given, "spatial_merge_size")
        window = positive(given, "window_size") // unit
        full = given["fullatt_block_indexes"]
        if not window:
            raise ConfigError(
                f"config.json has window_size {given['window_size']}; it must be at least {unit}."
            )
        if not isinstance(full, list) or any(type(layer) is not int for layer in full):
            raise ConfigError(
                f"config.json has fullatt_block_indexes = {full!r:.80}; it must be a list of "
                "layers."
            )
        return cls.from_hf(
            given,
            DEFAULTS,
            window=window,
            full_layers=frozenset(full),
            normalization=normalization_of(config, CLIP_MEAN, CLIP_STD),
        )


class Qwen25Vision(nn.Module):
    names: ClassVar[Names] = NAMES

    def __init__(self, config: Qwen25VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = config
        self.dtype, self.width = dtype, c.out_hidden
        self.patches = patch_embedding(c, bias=False)
        shape = BlockShape(
            hidden=c.hidden,
            intermediate=c.intermediate,
            heads=c.heads,
            activation=GATED[c.activation],
            norm=partial(RMSNorm, c.hidden, EPS),
            gate=("gate", "up"),
        )
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden, EPS)
        self.merger = Merger(c)

    def encode(self, pixels: torch.Tensor, image: Image) -> Units:
        """Pixels uint8 [1, height, width, 3] -> embeddings [n, out_hidden], row by row."""
        c = self.config
        grid = Grid.of(pixels, c)
        order, windows = window_order(grid, c.window)
        order, windowed = order.to(pixels.device), Spans(windows)
        everywhere = Spans((grid.rows * grid.columns,))
        positions = _in_order(grid.positions(pixels.device), order)
        angles = angles_at(positions, c.head_dim, c.theta, self.dtype)
        squares = _in_order(picture_patches(pixels, grid, c.patch_size), order)
        numbers = c.normalization(squares, self.dtype)
        x, delta = self.patches(in_frames(numbers, c.frames)), None
        for index, block in enumerate(self.blocks):
            spans = everywhere if index in c.full_layers else windowed
            x, delta = yield from block(x, delta, spans, angles)
        normed = self.norm.add(x, delta)[1]
        merged = self.merger(normed.view(len(order), -1))
        return torch.empty_like(merged).index_copy_(0, order, merged)


def _in_order(patches: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Bring patches [n, ...] into another `order` of their squares."""
    return patches.unflatten(0, (len(order), -1))[order].flatten(0, 1)


def window_order(grid: Grid, window: int) -> tuple[torch.Tensor, list[int]]:
    """Return the embeddings [n] int64 window by window, and the patches in each window.

    Windows at the right and lower border are smaller, and are not padded.
    """
    rows, columns = grid.units
    numbers = torch.arange(rows * columns, device="cpu").view(rows, columns)
    windows = [
        square.flatten() for band in numbers.split(window) for square in band.split(window, dim=1)
    ]
    return torch.cat(windows), [len(each) * grid.merge**2 for each in windows]
