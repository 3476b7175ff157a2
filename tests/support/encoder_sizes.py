"""Which model of embeddings or scores fits which machine, planned from published sizes.

`python -m tests.support.encoder_sizes` prints the table of docs/embeddings.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.layers.linear import Linear
from engine.memory.model_plan import ModelPlan
from engine.memory.report import planned_bytes

GB, MILLION = 10**9, 10**6
ENGLISH, MANY = "English", "many"


@dataclass(frozen=True)
class Encoder:
    """A published checkpoint: the keys of its config.json that a model is built from."""

    name: str
    languages: str
    config: dict[str, Any]
    longest: int  # tokens of a text, of the folder's sentence-transformers files


def bert(layers: int, hidden: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "vocab_size": 30522,
        "type_vocab_size": 2,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
    } | more


def cross_encoder(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same encoder with a head that scores pairs."""
    name = config["architectures"][0].removesuffix("Model")
    head = {"architectures": [f"{name}ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    return config | head


MINILM = bert(6, 384, 1536, 12)
MPNET = bert(
    *(12, 768, 3072, 12),
    architectures=["MPNetModel"],
    vocab_size=30527,
    max_position_embeddings=514,
    layer_norm_eps=1e-5,
    relative_attention_num_buckets=32,
)
XLM_R = bert(
    *(24, 1024, 4096, 16),
    architectures=["XLMRobertaModel"],
    vocab_size=250002,
    type_vocab_size=1,
    max_position_embeddings=8194,
    layer_norm_eps=1e-5,
    pad_token_id=1,
)
NOMIC = {
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "n_layer": 12,
    "n_embd": 768,
    "n_inner": 3072,
    "n_head": 12,
    "n_positions": 8192,
    "vocab_size": 30528,
    "type_vocab_size": 2,
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "qkv_proj_bias": False,
}
MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "num_hidden_layers": 22,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
}
EMBEDDING_GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 24,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 2048,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "use_bidirectional_attention": True,
}
QWEN3 = {
    "architectures": ["Qwen3Model"],
    "hidden_act": "silu",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151669,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
EMBEDDERS = (
    Encoder("sentence-transformers/all-MiniLM-L6-v2", ENGLISH, MINILM, 256),
    Encoder("BAAI/bge-small-en-v1.5", ENGLISH, bert(12, 384, 1536, 12), 512),
    Encoder(
        "intfloat/multilingual-e5-small", MANY, bert(12, 384, 1536, 12, vocab_size=250037), 512
    ),
    Encoder("sentence-transformers/all-mpnet-base-v2", ENGLISH, MPNET, 384),
    Encoder("nomic-ai/nomic-embed-text-v1.5", ENGLISH, NOMIC, 8192),
    Encoder("Alibaba-NLP/gte-modernbert-base", ENGLISH, MODERNBERT, 8192),
    Encoder("google/embeddinggemma-300m", MANY, EMBEDDING_GEMMA, 2048),
    Encoder("BAAI/bge-m3", MANY, XLM_R, 8192),
    Encoder("Qwen/Qwen3-Embedding-0.6B", MANY, QWEN3, 32768),
)
RERANKERS = (
    Encoder("cross-encoder/ms-marco-MiniLM-L6-v2", ENGLISH, cross_encoder(MINILM), 512),
    Encoder("Alibaba-NLP/gte-reranker-modernbert-base", ENGLISH, cross_encoder(MODERNBERT), 8192),
    Encoder("BAAI/bge-reranker-v2-m3", MANY, cross_encoder(XLM_R), 8192),
)


def row(encoder: Encoder, folder: Path) -> str:
    """Return the line of docs/embeddings.md for one model in bfloat16 on a CPU."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(encoder.config))
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="bfloat16", max_model_len=encoder.longest
    )
    plan = ModelPlan(config)
    memory = sum(planned_bytes(plan, 0, plan.max_model_len).values())
    layers = (module for module in plan.module.modules() if isinstance(module, Linear))
    multiplied = sum(weight.numel() for layer in layers for weight in layer.parameters())
    cells = [
        f"`{encoder.name}`",
        encoder.languages,
        f"{encoder.longest:,}",
        f"{plan.num_parameters / MILLION:.0f}",
        f"{multiplied / MILLION:.0f}",
        f"{memory / GB:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(encoders: Sequence[Encoder]) -> list[str]:
    """Return the lines of the table, without its head."""
    with tempfile.TemporaryDirectory() as folder:
        return [row(encoder, Path(folder, str(n))) for n, encoder in enumerate(encoders)]


if __name__ == "__main__":
    print("\n".join([*table(EMBEDDERS), "", *table(RERANKERS)]))
