"""The towers of Qwen2.5-VL and Qwen3-VL share this: pictures of any size, in merge order.

The patches of a square that becomes one embedding follow each other. A position has a row and a
column, which each rotate one half of a head's dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from engine.errors import ConfigError, RequestRejectedError
from engine.layers.mlp import ACTIVATIONS
from engine.layers.rotary import rope_theta
from engine.models.base import expect, layer_count, positive, shared_by
from engine.models.vision.block import PatchEmbedding, TowerLinear
from engine.models.vision.pixels import CHANNELS
from engine.ops.kernels import Kernels
from engine.ops.rotary import Angles

EPS = 1e-6  # of all norms; config.json does not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenTowerConfig:
    """The `vision_config` of Qwen's towers."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    patch_size: int
    frames: int  # that a patch has; a picture is repeated in all
    merge: int  # patches along a side of the square that becomes one embedding
    out_hidden: int
    theta: float
    activation: str

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.frames * self.patch_size**2

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], defaults: Mapping[str, Any], **own: Any) -> Self:
        """Read `vision_config`. The fields in `own` are the class's own.

        Raises ConfigError for an unsupported variant.
        """
        given = dict(defaults) | dict(config)
        expect(given, "in_channels", CHANNELS)
        rope = given.get("rope_parameters") or {}
        expect(rope, "rope_type", "axial", "default")
        hidden, heads = shared_by(given, "hidden_size", "num_heads")
        if hidden // heads % 4:
            raise ConfigError(
                f"config.json has hidden_size {hidden} and num_heads {heads}; the dimensions of a "
                "head must be a multiple of 4, to be rotated by row and column."
            )
        return cls(
            hidden=hidden,
            intermediate=positive(given, "intermediate_size"),
            layers=layer_count(given, "depth"),
            heads=heads,
            patch_size=positive(given, "patch_size"),
            frames=positive(given, "temporal_patch_size"),
            merge=positive(given, "spatial_merge_size"),
            out_hidden=positive(given, "out_hidden_size"),
            theta=rope_theta(given),
            activation=given["hidden_act"],
            **own,
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """The rows and columns of a picture's patches, and how many of them are merged."""

    rows: int
    columns: int
    merge: int

    @classmethod
    def of(cls, pixels: torch.Tensor, config: QwenTowerConfig) -> Grid:
        """Return the grid of a picture [1, height, width, 3].

        Raises RequestRejectedError for a side that is not a multiple of the merged squares'.
        """
        _, height, width, _ = pixels.shape
        size = config.patch_size
        unit = size * config.merge
        if height % unit or width % unit:
            raise RequestRejectedError(
                "invalid_value",
                f"A picture has {height} x {width} pixels, and the model reads multiples of "
                f"{unit}. The checkpoint's image processor does not fit its config.json.",
            )
        return cls(height // size, width // size, config.merge)

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns of embeddings."""
        return self.rows // self.merge, self.columns // self.merge

    def merged(self, grid: torch.Tensor) -> torch.Tensor:
        """Bring what is [rows, columns, ...] into merge order: [rows * columns, ...]."""
        unit_rows, unit_columns = self.units
        merge = self.merge
        squares = grid.unflatten(1, (unit_columns, merge)).unflatten(0, (unit_rows, merge))
        return squares.transpose(1, 2).flatten(0, 3)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return row and column of each patch, [rows * columns, 2] int64."""
        rows = torch.arange(self.rows, device=device)[:, None].expand(-1, self.columns)
        columns = torch.arange(self.columns, device=device)[None].expand(self.rows, -1)
        return self.merged(torch.stack((rows, columns), dim=-1))


def picture_patches(pixels: torch.Tensor, grid: Grid, size: int) -> torch.Tensor:
    """Cut a picture [1, height, width, 3] into squares in merge order: [n, 3, size * size]."""
    squares = pixels[0].unflatten(1, (grid.columns, size)).unflatten(0, (grid.rows, size))
    ordered = squares.permute(0, 2, 4, 1, 3).flatten(3)  # [rows, columns, 3, size * size]
    return grid.merged(ordered)


def in_frames(patches: torch.Tensor, frames: int) -> torch.Tensor:
    """Repeat patches [n, 3, P] in all frames: [n, 3 * frames * P]."""
    return patches[:, :, None].expand(-1, -1, frames, -1).flatten(1)


def angles_at(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Angles:
    """Return cosines and signed sines [n, 1, head_dim] of positions [n, 2], made in fp32.

    The first quarter of a head's dimensions, and the third, are rotated by the row.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=positions.device) / half
    turns = (positions[..., None].float() * (1.0 / theta**exponents)).flatten(1)  # [n, half]
    cos, sin = turns.cos(), turns.sin()
    tables = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)))
    cos, sin = tables[:, :, None].to(dtype).unbind(0)
    return cos, sin


class Merger(nn.Module):
    """down(gelu(up(x))) of squares of patches [n, merge² * hidden]."""

    def __init__(self, config: QwenTowerConfig) -> None:
        super().__init__()
        width = config.hidden * config.merge**2
        self.up = TowerLinear(width, width, bias=True)
        self.down = TowerLinear(width, config.out_hidden, bias=True)
        self.kernels: Kernels = "torch"

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        return self.down(ACTIVATIONS["gelu"](self.up(squares), self.kernels))


def patch_embedding(config: QwenTowerConfig, *, bias: bool) -> PatchEmbedding:
    """Return the layer that embeds the patches."""
    return PatchEmbedding(config.patch_numbers, config.hidden, bias=bias)
