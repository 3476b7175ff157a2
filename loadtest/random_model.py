"""A checkpoint of a given shape with random weights, for measurements of speed only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# A 125M shape common in CPU benchmarks: 30 layers, hidden size 576, 9 query heads and 3 kv heads.
LLAMA_125M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

# The shape of TinyLlama-1.1B: at one stream, a step is limited by reading 2.2 GB of weights.
LLAMA_1B = LLAMA_125M | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


def write_random_llama(folder: Path, config: dict[str, object]) -> None:
    """Write config, bf16 weights (seed 0) and a byte-level tokenizer of the right size."""
    folder.mkdir(parents=True, exist_ok=True)
    c = {k: v for k, v in config.items() if isinstance(v, int)}
    hidden, ffn, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": weight(c["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = weight(rows * dim, hidden)
        tensors[f"{layer}.self_attn.o_proj.weight"] = weight(hidden, heads * dim)
        tensors[f"{layer}.mlp.gate_proj.weight"] = weight(ffn, hidden)
        tensors[f"{layer}.mlp.up_proj.weight"] = weight(ffn, hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = weight(hidden, ffn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    byte_tokenizer(c["vocab_size"]).save(str(folder / "tokenizer.json"))


def write_random_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], rank: int, seed: int
) -> None:
    """Write a LoRA adapter in PEFT's format (bf16) for all linear layers of a random Llama.

    `shapes` has the shapes of the model's tensors by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            out, inputs = shape
            for half, size in (("A", (rank, inputs)), ("B", (out, rank))):
                weight = (torch.randn(size, generator=generator) * 0.02).bfloat16()
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = weight
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer with byte tokens and filler words, so that every id decodes to text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i + 3 for i, token in enumerate(alphabet)}
    vocab |= {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"Ġw{i}": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
