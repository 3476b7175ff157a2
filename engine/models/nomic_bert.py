"""Nomic Embed (arXiv 2402.01613): BERT with rotary position embedding, SwiGLU and fewer biases.

Published checkpoints have the keys of the code that trained them, after GPT-2's. transformers
passes over these keys. Here they are read, or refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import Names
from engine.layers.rotary import RopeScaling, RotaryEmbedding, expect_one_table, rope_theta
from engine.models.base import expect, required
from engine.models.bert import Bert, BertConfig
from engine.ops.kernels import Kernels
from engine.ops.rotary import apply_rotary

BLOCK = "encoder.layers.{i}"
NAMES_NOMIC: Names = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "emb_ln",
    "blocks.{i}.qkv": f"{BLOCK}.attn.Wqkv",
    "blocks.{i}.out": f"{BLOCK}.attn.out_proj",
    "blocks.{i}.attention_norm": f"{BLOCK}.norm1",
    "blocks.{i}.mlp.up": {"up": f"{BLOCK}.mlp.fc11", "gate": f"{BLOCK}.mlp.fc12"},
    "blocks.{i}.mlp.down": f"{BLOCK}.mlp.fc2",
    "blocks.{i}.mlp_norm": f"{BLOCK}.norm2",
}
# The values of published files with rotary positions. transformers does not read the key.
POSITIONS = ("absolute", "rope", "rotary")
# The key of transformers -> that of published checkpoints.
KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
# The variant that Nomic Embed v1 and v1.5 are, of those that their code computes.
VARIANT: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "rotary_emb_fraction": (1,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "prenorm": (False,),
    "causal": (False,),
    "use_rms_norm": (None, False),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "num_experts": (None, 0),
    "parallel_block": (False,),
}
# Without these, that code computes another variant.
NEEDED = ("activation_function", "rotary_emb_fraction", "qkv_proj_bias", "mlp_fc1_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryBertConfig(BertConfig):
    """The config of a BERT with rotary position embedding in place of a table of positions."""

    rope_theta: float
    rope_scaling: RopeScaling

    @property
    def position_rows(self) -> int | None:
        return None

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, theta: float = 1e4, **own: Any) -> Self:
        """Read config.json. `theta` is the rotary base of an architecture's configs without one.

        Raises ConfigError for a missing key or an unsupported variant.
        """
        rope = config | {"rope_theta": config.get("rope_theta") or theta}
        own |= {"rope_theta": rope_theta(rope), "rope_scaling": RopeScaling.from_hf(rope)}
        expect_one_table(own["rope_scaling"])
        expect(config, "position_embedding_type", *POSITIONS)
        named = config | {"position_embedding_type": "absolute"}
        facts = super(RotaryBertConfig, cls).from_hf(named, **own)
        expect(config, "head_dim", None, facts.hidden // facts.heads)
        return facts


class RotaryBert(Bert):
    config: RotaryBertConfig

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        c = self.config
        self.rotary = RotaryEmbedding(
            c.hidden // c.heads, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        self.kernels: Kernels = "torch"

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedded(batch)
        cos, sin = self.rotary(batch.positions)

        def rotate(qkv: torch.Tensor) -> torch.Tensor:
            queries_and_keys = qkv.shape[1] // 3 * 2  # a rank has a part of the heads
            qk, v = qkv.tensor_split((queries_and_keys,), dim=1)
            return torch.cat((apply_rotary(qk, cos, sin, kernels=self.kernels), v), dim=1)

        for block in self.blocks:
            x = block(x, batch, rotate)
        return x


class NomicBert(RotaryBert):
    names = NAMES_NOMIC
    prefixes = ("nomic_bert.", "bert.")

    @staticmethod
    def read_config(config: dict[str, Any]) -> RotaryBertConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return RotaryBertConfig.from_hf(
            {"hidden_act": "silu"} | _spelling_of_transformers(config),
            theta=1000.0,
            attention_bias=False,
            gated=True,
            up_bias=False,
            down_bias=False,
        )


def _spelling_of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of transformers, from either spelling."""
    for key, allowed in VARIANT.items():
        expect(config, key, *allowed)
    renamed = {key: config[old] for key, old in KEYS.items() if old in config}
    for key, value in renamed.items():
        expect(config, key, value)
    if renamed:
        for key in NEEDED:
            required(config, key)
    return config | renamed
