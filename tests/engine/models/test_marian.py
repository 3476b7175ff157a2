"""Marian against transformers, and against the equations of the paper (arXiv 1706.03762)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.layers.embedding import Sinusoids
from engine.models.marian import DecoderBlock, EncoderBlock
from tests.support.forward import forward, whole
from tests.support.golden import (
    TOLERANCE,
    Case,
    Edit,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    greedy,
    of_transformers,
    refusal,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import MarianConfig

    small = {
        "vocab_size": 211,
        "d_model": 48,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 128,
        "activation_function": "relu",
        "scale_embedding": True,
        "pad_token_id": 210,
        "decoder_start_token_id": 210,
        "forced_eos_token_id": None,
    }
    return MarianConfig(**(small | overrides))


@torch.no_grad()
def lively(model: Any) -> None:
    """Adjust random weights so that greedy answers do not repeat one token.

    With random post-norm layers and a tied head, the model repeats its input token. Here the
    sublayers add little, and the last norm has negative weights, away from that token.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            parameter.mul_(0.2)
        elif name.endswith("bias"):
            parameter.mul_(0.3)
    model.model.decoder.layers[-1].final_layer_norm.weight.neg_()


def shares_embedding(model: Any) -> None:
    """Share the token embedding, as the config says.

    transformers 5 does not share it if the head has its own weights.
    """
    lively(model)
    for side in (model.model.encoder, model.model.decoder):
        side.embed_tokens.weight = model.model.shared.weight


LIVELY = partial(of_transformers, prepare=lively)
SHARED = partial(of_transformers, prepare=shares_embedding)


def case(name: str, edit: Edit | None = None, **overrides: Any) -> Case:
    return Case(name, lambda: config(**overrides), reference=LIVELY, edit=edit)


def no_position(self: Sinusoids, positions: Tensor) -> Tensor:
    return torch.zeros(len(positions), self.table.shape[1])


def pre_norm_encoder(self: EncoderBlock, x: Tensor, batch: Any) -> Tensor:
    x = x + self.attention(self.attention_norm(x), batch)
    return x + self.mlp(self.mlp_norm(x))


def pre_norm_decoder(self: DecoderBlock, x: Tensor, batch: Any) -> Tensor:
    x = x + self.attention(self.attention_norm(x), batch)
    x = x + self.cross(self.cross_norm(x), batch)
    return x + self.mlp(self.mlp_norm(x))


def with_copies(config: dict[str, Any], tensors: Tensors) -> None:
    """Add the copies of the token embedding and the sinusoids that files of OPUS-MT contain."""
    embed = tensors["model.shared.weight"]
    for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = embed.clone()
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = torch.rand(128, 48)


PARTS = [
    *("final_logits_bias", "decoder.layers.1.final_layer_norm.bias", "encoder.layers.0.fc1.bias"),
    *("encoder.layers.0.self_attn_layer_norm.weight", "encoder.layers.2.final_layer_norm"),
    *(f"self_attn.{name}_proj.bias" for name in ("q", "v", "out")),
    *(f"encoder_attn.{name}_proj.bias" for name in ("q", "v", "out")),
    *("encoder_attn_layer_norm.bias", "decoder.layers.0.fc2.bias"),
]
MARIAN = case("marian")
CASES = [
    replace(
        MARIAN,
        without={"scale_embedding": False, "activation_function": "gelu"},
        zeroed=PARTS,
        replaced={
            "engine.layers.embedding.Sinusoids.forward": no_position,
            "engine.models.marian.EncoderBlock.forward": pre_norm_encoder,
            "engine.models.marian.DecoderBlock.forward": pre_norm_decoder,
        },
    ),
]
OWN = {"share_encoder_decoder_embeddings": False}
SPELLINGS = [
    case("copies", with_copies),
    case("swish", activation_function="swish", scale_embedding=False),
    case("gelu", activation_function="gelu"),
    replace(
        case("untied", **OWN, tie_word_embeddings=False),
        zeroed=["model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"],
    ),
    replace(case("own-head", tie_word_embeddings=False), reference=SHARED, zeroed=["lm_head"]),
    case("two-embeddings", **OWN),
]


@golden_tests(CASES)
def test_marian_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill, greedy])
@pytest.mark.variants(2)
def test_marian_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


class Paper:
    """The equations of the paper, computed one by one for one text at a time."""

    def __init__(self, golden: Golden) -> None:
        self.config = json.loads((golden.folder / "config.json").read_text())
        tensors = load_file(golden.folder / "model.safetensors")
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        scaled = (x - mean) / (variance + 1e-5).sqrt()
        return scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def attention(self, name: str, x: Tensor, source: Tensor, *, causal: bool = False) -> Tensor:
        """Attention of section 3.2, head by head."""
        heads = self.config[f"{name.split('.')[1]}_attention_heads"]
        q, k, v = (
            self.linear(f"{name}.{part}_proj", states).chunk(heads, dim=-1)
            for part, states in (("q", x), ("k", source), ("v", source))
        )
        outputs = []
        for head in range(heads):
            scores = q[head] @ k[head].T / math.sqrt(q[head].shape[-1])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            outputs.append(scores.softmax(-1) @ v[head])
        return self.linear(f"{name}.out_proj", torch.cat(outputs, -1))

    def embed(self, ids: list[int]) -> Tensor:
        """Embeddings and positions of sections 3.4 and 3.5.

        Marian stores the odd features after the even ones.
        """
        size = self.config["d_model"]
        angle = [
            [position / 10000 ** (2 * i / size) for i in range(size // 2)]
            for position in range(len(ids))
        ]
        angles = torch.tensor(angle, dtype=torch.float64)
        positions = torch.cat([angles.sin(), angles.cos()], -1)
        return self.tensors["model.shared.weight"][ids] * math.sqrt(size) + positions

    def feed_forward(self, layer: str, x: Tensor) -> Tensor:
        """Feed-forward network of section 3.3."""
        return self.linear(f"{layer}.fc2", self.linear(f"{layer}.fc1", x).clamp(min=0))

    def logits(self, source: list[int], answer: list[int]) -> Tensor:
        """Encoder and decoder of section 3.1: LayerNorm(x + Sublayer(x))."""
        states = self.embed(source)
        for number in range(self.config["encoder_layers"]):
            layer = f"model.encoder.layers.{number}"
            attended = self.attention(f"{layer}.self_attn", states, states)
            states = self.norm(f"{layer}.self_attn_layer_norm", states + attended)
            fed = self.feed_forward(layer, states)
            states = self.norm(f"{layer}.final_layer_norm", states + fed)
        x = self.embed(answer)
        for number in range(self.config["decoder_layers"]):
            layer = f"model.decoder.layers.{number}"
            attended = self.attention(f"{layer}.self_attn", x, x, causal=True)
            x = self.norm(f"{layer}.self_attn_layer_norm", x + attended)
            attended = self.attention(f"{layer}.encoder_attn", x, states)
            x = self.norm(f"{layer}.encoder_attn_layer_norm", x + attended)
            x = self.norm(f"{layer}.final_layer_norm", x + self.feed_forward(layer, x))
        return x @ self.tensors["model.shared.weight"].T + self.tensors["final_logits_bias"]


def equals_the_paper(golden: Golden) -> None:
    paper = Paper(golden)
    ours = forward(golden.runner, golden.prompts, whole(golden.prompts), golden.sources)
    for prompt, source, logits in zip(golden.prompts, golden.sources, ours, strict=True):
        torch.testing.assert_close(logits, paper.logits(source, prompt).float(), **TOLERANCE)


@golden_tests([MARIAN], [equals_the_paper])
def test_marian_matches_equations_of_the_paper(golden: Golden, equality: Equality) -> None:
    equality(golden)


def refuses_variants(golden: Golden) -> None:
    variants = {
        "normalize_before": True,
        "normalize_embedding": True,
        "add_final_layer_norm": True,
        "static_position_embeddings": False,
        "activation_function": "tanh",
        "decoder_vocab_size": 300,
        "encoder_attention_heads": 5,
        "d_model": None,
        "max_position_embeddings": None,
    }
    for key, value in variants.items():
        said = refusal(golden, lambda config, _, field={key: value}: config.update(field))
        assert key in said or "not divisible by 5 heads" in said


@golden_tests([MARIAN], [refuses_variants])
def test_marian_unsupported_variant_raises_config_error(golden: Golden, equality: Equality) -> None:
    equality(golden)
