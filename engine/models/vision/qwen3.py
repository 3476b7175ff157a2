"""The images of Qwen3-VL (arXiv 2511.21631) and Qwen3.5: interpolated positions, and DeepStack.

With DeepStack (arXiv 2406.04334), hidden states of some layers become further embeddings, which the
first layers of the language model add. Qwen3.5 has none of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from engine.checkpoint.image_config import CLIP_MEAN, CLIP_STD
from engine.checkpoint.weight_map import Names
from engine.errors import ConfigError
from engine.layers.embedding import TokenEmbedding
from engine.layers.mlp import ACTIVATIONS
from engine.layers.norm import LayerNorm
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
    "positions": "pos_embed",
    "blocks.{i}.attention_norm": "blocks.{i}.norm1",
    "blocks.{i}.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.out": "blocks.{i}.attn.proj",
    "blocks.{i}.mlp_norm": "blocks.{i}.norm2",
    "blocks.{i}.mlp.up": "blocks.{i}.mlp.linear_fc1",
    "blocks.{i}.mlp.down": "blocks.{i}.mlp.linear_fc2",
    "norm": "merger.norm",
    "merger.up": "merger.linear_fc1",
    "merger.down": "merger.linear_fc2",
    "deep.{i}.norm": "deepstack_merger_list.{i}.norm",
    "deep.{i}.merger.up": "deepstack_merger_list.{i}.linear_fc1",
    "deep.{i}.merger.down": "deepstack_merger_list.{i}.linear_fc2",
}
# The defaults of transformers.
DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
DEEP_LAYERS = (8, 16, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VisionConfig(QwenTowerConfig):
    positions: int  # rows in the table of positions, a square
    deep_layers: tuple[int, ...]  # behind which hidden states become further embeddings
    normalization: Normalization

    @classmethod
    def read(
        cls, config: dict[str, Any], deep_layers: tuple[int, ...] = DEEP_LAYERS
    ) -> Qwen3VisionConfig:
        """Read config.json with the image processor's config as "image_processor".

        `deep_layers` are those of a config without the key. With () there is no DeepStack at all.
        Raises ConfigError for an unsupported variant.
        """
        given = DEFAULTS | vision_config(config)
        expect(given, "hidden_act", *ACTIVATIONS)
        positions = positive(given, "num_position_embeddings")
        if math.isqrt(positions) ** 2 != positions:
            raise ConfigError(
                f"config.json has num_position_embeddings {positions}; it must be a square number."
            )
        deep = given.get("deepstack_visual_indexes", deep_layers) if deep_layers else ()
        depth = positive(given, "depth")
        is_list = isinstance(deep, list | tuple) and len(set(deep)) == len(deep)
        if not is_list or any(type(layer) is not int or not 0 <= layer < depth for layer in deep):
            raise ConfigError(
                f"config.json has deepstack_visual_indexes = {deep!r:.80}; it must be a list of "
                f"different layers below {depth}."
            )
        return cls.from_hf(
            given,
            DEFAULTS,
            positions=positions,
            deep_layers=tuple(deep),
            normalization=normalization_of(config, CLIP_MEAN, CLIP_STD),
        )


class DeepMerger(nn.Module):
    """The merger of an inner layer: here the norm is that of a whole square."""

    def __init__(self, config: Qwen3VisionConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.hidden * config.merge**2, EPS)
        self.merger = Merger(config)

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """[n, merge² * hidden] -> [n, out_hidden]."""
        return self.merger(self.norm(squares))


class Qwen3Vision(nn.Module):
    names: ClassVar[Names] = NAMES

    def __init__(self, config: Qwen3VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = config
        self.dtype, self.width = dtype, c.out_hidden * (1 + len(c.deep_layers))
        self.patches = patch_embedding(c, bias=True)
        self.positions = TokenEmbedding(c.positions, c.hidden)
        shape = BlockShape(
            hidden=c.hidden,
            intermediate=c.intermediate,
            heads=c.heads,
            activation=ACTIVATIONS[c.activation],
            norm=partial(LayerNorm, c.hidden, EPS),
        )
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(c.layers))
        self.norm = LayerNorm(c.hidden, EPS)
        self.merger = Merger(c)
        self.deep = nn.ModuleList(DeepMerger(c) for _ in c.deep_layers)

    def encode(self, pixels: torch.Tensor, image: Image) -> Units:
        """Pixels uint8 [1, height, width, 3] -> embeddings [n, out_hidden * (1 + deep layers)].

        They are in order row by row. Those of the deep layers follow the tower's own.
        """
        c = self.config
        grid = Grid.of(pixels, c)
        units = grid.units[0] * grid.units[1]
        positions = grid.positions(pixels.device)
        angles = angles_at(positions, c.head_dim, c.theta, self.dtype)
        numbers = c.normalization(picture_patches(pixels, grid, c.patch_size), self.dtype)
        x: torch.Tensor = self.patches(in_frames(numbers, c.frames)) + self._places(positions, grid)
        delta: torch.Tensor | None = None
        spans = Spans((len(x),))
        further: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            x, delta = yield from block(x, delta, spans, angles)
            if index in c.deep_layers:
                x, delta = x + delta, None
                further.append(self.deep[c.deep_layers.index(index)](x.view(units, -1)))
        normed = self.norm(x) if delta is None else self.norm.add(x, delta)[1]
        merged = self.merger(normed.view(units, -1))
        return torch.cat((merged, *further), dim=1) if further else merged

    def _places(self, positions: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the embedding [n, hidden] of positions [n, 2].

        It is bilinearly interpolated in the table, whose corners are those of the picture.
        """
        side = math.isqrt(self.config.positions)
        lengths = torch.tensor((grid.rows, grid.columns), device=positions.device)
        places = positions.float() * (side - 1) / (lengths - 1).clamp(min=1)
        near = places.floor()
        share = places - near  # [n, 2]: the weight of the further neighbour
        first = near.long()
        rows, columns = torch.stack((first, (first + 1).clamp(max=side - 1))).unbind(-1)  # [2, n]
        down, right = torch.stack((1 - share, share)).unbind(-1)
        total = share.new_zeros(len(positions), self.config.hidden)
        for i in range(2):
            for j in range(2):
                neighbour = self.positions(rows[i] * side + columns[j])
                total += neighbour * (down[i] * right[j])[:, None]
        return total.to(self.dtype)
