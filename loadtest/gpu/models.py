"""Real model shapes with random weights, and lower bounds on their time on a given chip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.random_model import byte_tokenizer

ROPE_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
# As published in each model's config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": ROPE_LLAMA_3,
        "tie_word_embeddings": False,
    },
    "gemma-2-2b": GEMMA_2
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma-2-9b": GEMMA_2
    | {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
# Overrides of `--smoke`: the same architectures, small enough for a test on a CPU.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def write_model(config: dict[str, Any], folder: Path) -> Path:
    """Write a folder for `--load-format dummy`: config.json and a byte-level tokenizer."""
    config = config | {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    byte_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True, slots=True)
class Chip:
    """Measured rates: bytes/s of memory reads, FLOP/s of bf16 matmul."""

    read: float
    matmul: float


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model in bf16. Windows are ignored, because contexts here are shorter."""

    linear: int  # weights that every token is multiplied by
    head: int  # weights of the projection to the vocabulary
    kv_bytes: int  # KV bytes per token, over all layers
    attention: int  # query heads times head_dim, summed over all layers

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        c = config
        queries = c["num_attention_heads"] * c["head_dim"]
        keys = c["num_key_value_heads"] * c["head_dim"]
        layer = c["hidden_size"] * (2 * queries + 2 * keys + 3 * c["intermediate_size"])
        layers = c["num_hidden_layers"]
        head = c["hidden_size"] * c["vocab_size"]
        return cls(layer * layers, head, 2 * 2 * layers * keys, queries * layers)

    def decode_seconds(self, contexts: Sequence[int], chip: Chip) -> float:
        """Return the minimum time of a decode step with one token for each context."""
        weights = self.linear + self.head
        read = 2 * weights / chip.read
        multiply = 2 * weights * len(contexts) / chip.matmul
        return max(read, multiply) + self.kv_bytes * sum(contexts) / chip.read

    def prefill_flops(self, tokens: int) -> float:
        """Return the FLOP of one prompt; causal attention costs half of the full square."""
        return 2 * (self.linear * tokens + self.head + self.attention * tokens**2)

    def offline_seconds(self, prompts: Sequence[int], outputs: Sequence[int], chip: Chip) -> float:
        """Return the minimum time for requests of these lengths that all run at once."""
        total = sum(map(self.prefill_flops, prompts)) / chip.matmul
        for step in range(1, max(outputs)):
            live = [p + step for p, o in zip(prompts, outputs, strict=True) if o > step]
            total += self.decode_seconds(live, chip)
        return total
