"""A checkpoint of a given shape with random weights, for measurements of speed only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


# LFM2 of SmolLM2-135M's size: 134 million weights, and 5 of 16 layers attend. `block_dim` and
# `conv_dim` are read by vLLM only.
LFM2_134M = LLAMA_125M | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention" if i % 3 == 2 else "conv" for i in range(16)],
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 768,
    "block_dim": 768,
    "block_ff_dim": 2048,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
}


def write_random_model(folder: Path, config: Mapping[str, object]) -> None:
    """Write config, bf16 weights (seed 0) and a byte-level tokenizer of the right size.

    `config` is a Llama's or that of an LFM2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = _lfm2_shapes(config) if config["model_type"] == "lfm2" else llama_shapes(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weight = torch.ones(shape)
        else:
            # A convolution's three numbers are larger, so that its layers have an effect.
            weight = torch.randn(shape, generator=generator) * (0.5 if len(shape) == 3 else 0.02)
        tensors[f"{name}.weight"] = weight.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    byte_tokenizer(_sizes(config)["vocab_size"]).save(str(folder / "tokenizer.json"))


def _sizes(config: Mapping[str, object]) -> dict[str, int]:
    return {key: value for key, value in config.items() if isinstance(value, int)}


def llama_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's weights by module. A shape of one number is a norm's."""
    c = _sizes(config)
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (c["vocab_size"], hidden)}
    shapes["model.norm"] = (hidden,)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}"] = (hidden,)
        shapes |= _attention_shapes(f"{layer}.self_attn", c, "o_proj")
        shapes[f"{layer}.mlp.gate_proj"] = (ffn, hidden)
        shapes[f"{layer}.mlp.up_proj"] = (ffn, hidden)
        shapes[f"{layer}.mlp.down_proj"] = (hidden, ffn)
    return shapes


def _lfm2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the same of an LFM2. The shape of a convolution has three numbers."""
    c = _sizes(config)
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (c["vocab_size"], hidden)}
    shapes["model.embedding_norm"] = (hidden,)
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}"
        for name in ("operator_norm", "ffn_norm"):
            shapes[f"{layer}.{name}"] = (hidden,)
        if kind == "conv":
            shapes[f"{layer}.conv.in_proj"] = (3 * hidden, hidden)
            shapes[f"{layer}.conv.conv"] = (hidden, 1, c["conv_L_cache"])
            shapes[f"{layer}.conv.out_proj"] = (hidden, hidden)
        else:
            shapes |= _attention_shapes(f"{layer}.self_attn", c, "out_proj")
            for name in ("q_layernorm", "k_layernorm"):
                shapes[f"{layer}.self_attn.{name}"] = (c["head_dim"],)
        shapes[f"{layer}.feed_forward.w1"] = (ffn, hidden)
        shapes[f"{layer}.feed_forward.w3"] = (ffn, hidden)
        shapes[f"{layer}.feed_forward.w2"] = (hidden, ffn)
    return shapes


def _attention_shapes(module: str, c: Mapping[str, int], out: str) -> dict[str, tuple[int, ...]]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    queries = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes: dict[str, tuple[int, ...]] = {f"{module}.{out}": (hidden, heads * dim)}
    for name, count in queries.items():
        shapes[f"{module}.{name}"] = (count * dim, hidden)
    return shapes


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
    words = range(len(vocab), vocab_size)
    vocab |= {f"Ġw{i}" if i > words.start else "Ġw": i for i in words}  # GGUF needs a merge
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
