"""The images of Gemma 4: a tower with rotated rows and columns, average pooling and a projection.

Pictures keep their proportions. The queries, keys and values of each head are normed, and scores
have no scale. Reference: Gemma4VisionModel of transformers 5.24, which also has padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from engine.checkpoint.weight_map import Names
from engine.errors import ConfigError
from engine.layers.clipped import ClippableLinear
from engine.layers.mlp import ACTIVATIONS
from engine.layers.norm import PlainRMSNorm, RMSNorm
from engine.layers.rotary import rope_theta
from engine.layers.span_attention import SpanAttention, Spans
from engine.models.base import expect, layer_count, positive, positive_float
from engine.models.vision.block import PatchEmbedding, TowerLinear, Units
from engine.models.vision.pixels import CHANNELS, Normalization, patches
from engine.models.vision.qwen_grid import angles_at
from engine.ops.kernels import Kernels
from engine.ops.rotary import Angles, apply_rotary
from engine.protocol.generate import Image

TOWER, PROJECTOR = "vision_tower.", "embed_vision."
LAYER = TOWER + "encoder.layers.{i}."
LINEARS = {
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "out": "self_attn.o_proj",
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
NORMS = {
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
NAMES = {
    "patches": TOWER + "patch_embedder",
    "patches.input_proj": TOWER + "patch_embedder.input_proj",
    **{f"blocks.{{i}}.{ours}": LAYER + theirs for ours, theirs in NORMS.items()},
    **{f"blocks.{{i}}.{ours}.linear": LAYER + f"{each}.linear" for ours, each in LINEARS.items()},
    **{f"blocks.{{i}}.{ours}.limits": LAYER + theirs for ours, theirs in LINEARS.items()},
    "standard": TOWER.removesuffix("."),
    "projection": PROJECTOR + "embedding_projection",
}
# The defaults of transformers: a nested vision_config may omit values that equal them.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
THETA, BUDGET = 100.0, 280
ZERO, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig:
    """The `vision_config` of a checkpoint, and what the image processor does with pixels."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    activation: str
    norm_eps: float
    pool: int  # patches along a side of the square that becomes one embedding
    patch_size: int
    positions: int  # along a side
    theta: float
    is_clipped: bool  # the inputs and outputs of linear layers
    is_standardized: bool  # what is pooled
    budget: int  # most embeddings of an image
    out_hidden: int  # of the language model
    normalization: Normalization

    @property
    def most_patches(self) -> int:
        """Most patches of an image, which go through a layer together."""
        return self.budget * self.pool**2

    @classmethod
    def from_hf(cls, config: dict[str, Any], hidden: int) -> Gemma4VisionConfig:
        """Read config.json with the image processor's config as "image_processor".

        Raises ConfigError for an unsupported variant.
        """
        given = DEFAULTS | config["vision_config"]
        image = config.get("image_processor") or {}
        expect(given, "hidden_activation", *ACTIVATIONS)
        expect(given.get("rope_parameters") or {}, "rope_type", "axial", "default")
        heads, head_dim = positive(given, "num_attention_heads"), positive(given, "head_dim")
        expect(given, "num_key_value_heads", heads)
        if head_dim % 4:
            raise ConfigError(
                f"config.json has head_dim {head_dim} in vision_config; it must be a multiple of "
                "4, to be rotated by row and column."
            )
        budget, pool = (
            positive(image, "max_soft_tokens", BUDGET),
            positive(given, "pooling_kernel_size"),
        )
        positions = positive(given, "position_embedding_size")
        if budget * pool > positions:
            raise ConfigError(
                f"config.json has position_embedding_size {positions}; a strip of {budget} "
                f"embeddings has {budget * pool} patches along a side."
            )
        return cls(
            hidden=positive(given, "hidden_size"),
            intermediate=positive(given, "intermediate_size"),
            layers=layer_count(given),
            heads=heads,
            head_dim=head_dim,
            activation=given["hidden_activation"],
            norm_eps=positive_float(given, "rms_norm_eps"),
            pool=pool,
            patch_size=positive(given, "patch_size"),
            positions=positions,
            theta=rope_theta({"rope_theta": THETA} | given),
            is_clipped=bool(given["use_clipped_linears"]),
            is_standardized=bool(given["standardize"]),
            budget=budget,
            out_hidden=hidden,
            normalization=Normalization.from_hf(image, ZERO, ONE, normalizes=False),
        )


class Patches(nn.Module):
    """The embeddings of patches: of their numbers, their column and their row."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        c = config
        self.input_proj = PatchEmbedding(CHANNELS * c.patch_size**2, c.hidden, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, c.positions, c.hidden))

    def forward(self, numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Numbers [n, 3 * size²] from 0 to 1, places [n, 2] int64 -> [n, hidden]."""
        columns, rows = self.position_embedding_table
        embedded: torch.Tensor = self.input_proj(numbers)
        return embedded + (columns[places[:, 0]] + rows[places[:, 1]])


class Gemma4VisionBlock(nn.Module):
    """Attention and a gated MLP, each between two norms."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        c, norm = config, partial(RMSNorm, config.hidden, config.norm_eps)
        make = partial(ClippableLinear, linear=TowerLinear, is_clipped=c.is_clipped)
        width = c.heads * c.head_dim
        self.attention_norm = norm()
        self.q, self.k, self.v = (make(c.hidden, width) for _ in range(3))
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.v_norm = PlainRMSNorm(c.norm_eps)
        self.attend = SpanAttention(c.heads, c.head_dim, scale=1.0)
        self.out = make(width, c.hidden)
        self.attention_post_norm = norm()
        self.mlp_norm = norm()
        self.gate, self.up = (make(c.hidden, c.intermediate) for _ in range(2))
        self.activation = ACTIVATIONS[c.activation]
        self.down = make(c.intermediate, c.hidden)
        self.mlp_post_norm = norm()
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor, spans: Spans, angles: Angles) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]. `angles` are those of `angles_at`."""
        attended = self.out(self._attended(self.attention_norm(x), spans, angles))
        x, normed = self.mlp_norm.add(x, attended, self.attention_post_norm)
        gated = self.activation(self.gate(normed), self.kernels).mul_(self.up(normed))
        return x + self.mlp_post_norm(self.down(gated))

    def _attended(self, x: torch.Tensor, spans: Spans, angles: Angles) -> torch.Tensor:
        heads = (self.attend.spec.num_heads, self.attend.spec.head_dim)
        q, k, v = (part(x).unflatten(1, heads) for part in (self.q, self.k, self.v))
        q, k = (in_quarters(x) for x in (self.q_norm(q), self.k_norm(k)))
        q, k = (apply_rotary(x, *angles, kernels=self.kernels) for x in (q, k))
        return self.attend(q, k, self.v_norm(v), spans)


class Standardization(nn.Module):
    """(x - bias) * scale, in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.std_bias = nn.Parameter(torch.empty(hidden))
        self.std_scale = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.std_bias.float()) * self.std_scale.float()


class Gemma4Vision(nn.Module):
    names: ClassVar[Names] = NAMES

    def __init__(self, config: Gemma4VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = config
        self.dtype, self.width = dtype, c.out_hidden
        self.patches = Patches(c)
        self.blocks = nn.ModuleList(Gemma4VisionBlock(c) for _ in range(c.layers))
        self.standard = Standardization(c.hidden) if c.is_standardized else None
        self.norm = PlainRMSNorm(c.norm_eps)
        self.projection = TowerLinear(c.hidden, c.out_hidden)

    def encode(self, pixels: torch.Tensor, image: Image) -> Units:
        """Pixels uint8 [1, height, width, 3] -> embeddings [n, out_hidden], row by row."""
        c = self.config
        rows, columns = (length // c.patch_size for length in pixels.shape[1:3])
        places = places_of(rows, columns, pixels.device)
        x: torch.Tensor = self.patches(self._numbers(pixels), places)
        angles = angles_at(places, c.head_dim, c.theta, self.dtype)
        spans = Spans((rows * columns,))
        for block in self.blocks:
            x = block(x, spans, angles)
            yield
        return self.projection(self.norm(self._pooled(x.view(rows, columns, -1))))

    def _numbers(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the numbers [n, 3 * size²] of the patches, from -1 to 1: row, column, channel."""
        squares = patches(pixels, self.config.patch_size)[0]
        numbers = self.config.normalization(squares, torch.float32).transpose(1, 2)
        return numbers.flatten(1).sub_(0.5).mul_(2).to(self.dtype)

    def _pooled(self, grid: torch.Tensor) -> torch.Tensor:
        """Return the means of squares of a grid [rows, columns, hidden]: [n, hidden]."""
        pool = self.config.pool
        squares = grid.float().unflatten(1, (-1, pool)).unflatten(0, (-1, pool))
        means = squares.mean((1, 3)).flatten(0, 1).to(grid.dtype)  # rounded as in the reference
        scaled = means.float() * self.config.hidden**0.5
        if self.standard is not None:
            scaled = self.standard(scaled)
        return scaled.to(grid.dtype)


def places_of(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return column and row of each patch, [rows * columns, 2] int64."""
    places = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
    )
    return torch.stack(places[::-1], dim=-1).flatten(0, 1)


def in_quarters(x: torch.Tensor) -> torch.Tensor:
    """Return heads [T, H, D] with their second and third quarter exchanged.

    The checkpoint's first half is rotated by the column, in pairs across its middle. `angles_at`
    pairs dimensions across the middle of the head.
    """
    return x.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
