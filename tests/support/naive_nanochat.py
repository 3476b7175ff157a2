"""A naive nanochat written from its equations: plain torch on whole sequences, without a cache.

Tensor names are upstream's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The model_config of a meta file."""

    sequence_len: int = 128
    vocab_size: int = 211
    n_layer: int = 5
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 64
    window_pattern: str | None = "SSSL"


@dataclass(frozen=True)
class Naive:
    """One generation of nanochat, with the calls of a transformers model that the tests use."""

    sizes: Sizes = Sizes()
    windows: tuple[int, ...] = (15, 15, 15, 128, 128)  # keys visible before the query's own
    rope_base: float = 100_000.0
    qk_factor: float = 1.2
    cap: float = 15.0
    eps: float = torch.finfo(torch.float32).eps
    lambdas: bool = True
    gate: tuple[int, float] | None = (12, 3.0)
    smear: bool = True
    rows: int = 256  # of the vocabulary tables, with padding

    @property
    def vocab_size(self) -> int:
        return self.sizes.vocab_size

    @property
    def value_layers(self) -> list[int]:
        layers = self.sizes.n_layer
        return [i for i in range(layers) if i % 2 == (layers - 1) % 2] if self.gate else []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        s = self.sizes
        width, kv_width = s.n_embd, s.n_kv_head * s.n_embd // s.n_head
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (self.rows, width),
            "lm_head.weight": (self.rows, width),
        }
        for i in range(s.n_layer):
            block = f"transformer.h.{i}"
            shapes[f"{block}.attn.c_q.weight"] = (width, width)
            shapes[f"{block}.attn.c_k.weight"] = (kv_width, width)
            shapes[f"{block}.attn.c_v.weight"] = (kv_width, width)
            shapes[f"{block}.attn.c_proj.weight"] = (width, width)
            shapes[f"{block}.mlp.c_fc.weight"] = (4 * width, width)
            shapes[f"{block}.mlp.c_proj.weight"] = (width, 4 * width)
        for i in self.value_layers:
            shapes[f"value_embeds.{i}.weight"] = (self.rows, kv_width)
            shapes[f"transformer.h.{i}.attn.ve_gate.weight"] = (s.n_kv_head, self.gate[0])
        if self.lambdas:
            shapes |= {"resid_lambdas": (s.n_layer,), "x0_lambdas": (s.n_layer,)}
        if self.smear:
            shapes |= {"smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,)}
        return shapes

    @cached_property
    def tensors(self) -> Tensors:
        """Random weights, so large that every feature affects the logits."""
        generator = torch.Generator().manual_seed(0)

        def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            noise = torch.randn(shape, generator=generator)
            if len(shape) == 1:
                return 1 + 0.3 * noise
            return noise if "gate" in name else noise * 2 * shape[-1] ** -0.5

        return {name: weight(name, shape) for name, shape in self.shapes().items()}

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, H, D] by minus theta."""
        time, _, dim = x.shape
        frequency = self.rope_base ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(time), frequency)[:, None]
        x1, x2 = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)

    def attention(self, h: torch.Tensor, ids: torch.Tensor, layer: int) -> torch.Tensor:
        s, w = self.sizes, self.tensors
        block, dim = f"transformer.h.{layer}.attn", s.n_embd // s.n_head
        q = (h @ w[f"{block}.c_q.weight"].T).view(len(h), s.n_head, dim)
        k = (h @ w[f"{block}.c_k.weight"].T).view(len(h), s.n_kv_head, dim)
        v = (h @ w[f"{block}.c_v.weight"].T).view(len(h), s.n_kv_head, dim)
        if layer in self.value_layers:
            channels, span = self.gate
            gate = span * torch.sigmoid(h[:, :channels] @ w[f"{block}.ve_gate.weight"].T)
            v = v + gate[..., None] * w[f"value_embeds.{layer}.weight"][ids].view_as(v)
        q, k = (self.norm(self.rotate(t)) * self.qk_factor for t in (q, k))
        k, v = (t.repeat_interleave(s.n_head // s.n_kv_head, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        back = torch.arange(len(h))[:, None] - torch.arange(len(h))
        scores = scores.masked_fill((back < 0) | (back > self.windows[layer]), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return out.reshape(len(h), -1) @ w[f"{block}.c_proj.weight"].T

    def mlp(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        up = h @ self.tensors[f"transformer.h.{layer}.mlp.c_fc.weight"].T
        return F.relu(up).square() @ self.tensors[f"transformer.h.{layer}.mlp.c_proj.weight"].T

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for ids [T]."""
        w = self.tensors
        x = self.norm(w["transformer.wte.weight"][ids])
        if self.smear:
            gate = w["smear_lambda"] * torch.sigmoid(x[1:, :24] @ w["smear_gate.weight"].T)
            x = torch.cat([x[:1], x[1:] + gate * x[:-1]])
        x0 = x
        for i in range(self.sizes.n_layer):
            if self.lambdas:
                x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * x0
            x = x + self.attention(self.norm(x), ids, i)
            x = x + self.mlp(self.norm(x), i)
            if i == self.sizes.n_layer // 2:
                middle = x
        if self.smear:
            x = x - w["backout_lambda"] * middle
        logits = self.norm(x) @ w["lm_head.weight"][: self.vocab_size].T
        return self.cap * torch.tanh(logits / self.cap)

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.stack([self.logits(row) for row in input_ids]))

    def generate(self, input_ids: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        """Generate greedily."""
        for _ in range(max_new_tokens):
            best = self(input_ids).logits[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, best], 1)
        return input_ids
