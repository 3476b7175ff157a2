"""BERT against transformers: post-norm, positions, token types, all spellings of tensor names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.bert import Bert, BertBlock
from tests.support.encoders import Encoder, EncoderCase, Equality, alone, encoder_tests
from tests.support.golden import Tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import BertConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 96,
    }
    return BertConfig(**(small | overrides))


def pre_norm(self: BertBlock, x: torch.Tensor, batch: Any, rotate: Any = None) -> torch.Tensor:
    """Stand-in for BertBlock.forward with norms before the sublayers instead of after them."""
    heads = self.attend.spec.num_heads
    qkv = self.qkv(self.attention_norm(x)).view(len(x), 3 * heads, self.attend.spec.head_dim)
    x = x + self.out(self.attend(*qkv.split(heads, dim=1), batch))
    return x + self.mlp(self.mlp_norm(x))


def as_of_2018(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit a checkpoint to the names of 2018: gamma and beta, and a buffer of positions."""
    tensors["bert.embeddings.position_ids"] = torch.arange(96).unsqueeze(0)
    for name in list(tensors):
        for today, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("Norm.bias", "Norm.beta")):
            if name.endswith(today):
                tensors[name.removesuffix(today) + old] = tensors.pop(name)


PARTS = [
    *("position_embeddings", "token_type_embeddings", "embeddings.LayerNorm.bias"),
    *("query.bias", "value.bias", "attention.output.dense.bias", "intermediate.dense.bias"),
    *("attention.output.LayerNorm.bias", ".output.dense.bias", "layer.2.output.LayerNorm.bias"),
]
REPLACED = {
    "engine.models.bert.BertBlock.forward": pre_norm,
    "engine.models.bert.Bert.encode": lambda self, batch: self.norm(self.embed(batch.input_ids)),
}


@encoder_tests([EncoderCase("plain", config, zeroed=PARTS, replaced=REPLACED)])
def test_bert_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests(
    [
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM"),
        EncoderCase("pre-training-2018", config, "BertForPreTraining", edit=as_of_2018),
        EncoderCase("tanh", lambda: config(hidden_act="gelu_new"), without={"hidden_act": "relu"}),
        EncoderCase("relu", lambda: config(hidden_act="relu"), without={"hidden_act": "gelu"}),
        EncoderCase(
            "epsilon", lambda: config(layer_norm_eps=0.5), without={"layer_norm_eps": 1e-12}
        ),
        EncoderCase("one-type", lambda: config(type_vocab_size=1)),
    ],
    [alone],
)
def test_bert_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"num_attention_heads": 5}, "hidden_size 48, which is not divisible by 5"),
        ({"type_vocab_size": 0}, "type_vocab_size = 0"),
        ({"layer_norm_eps": None}, "lacks 'layer_norm_eps'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bert_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config().to_dict() | wrong
    with pytest.raises(ConfigError, match=said), torch.device("meta"):
        Bert(given, max_positions=96, dtype=torch.float32)
