"""The config.json of published checkpoints of every served architecture.

Only the fields that a model is built from are kept. Sizes that no attention kernel sees are made
small: the vocabulary, the width of the MLP and the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine.attention.spec import AttentionSpec
from engine.layers.attention import Attention
from engine.models.registry import model_class
from loadtest.gpu.models import CONFIGS

SMALL = {"vocab_size": 640, "intermediate_size": 64, "num_hidden_layers": 2}


def decoder(
    name: str, hidden: int, heads: int, kv_heads: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    return (
        SMALL
        | {
            "architectures": [f"{name}ForCausalLM"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim or hidden // heads,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        }
        | more
    )


def gemma_3(hidden: int, heads: int, kv_heads: int, window: int) -> dict[str, Any]:
    facts = {"sliding_window": window, "sliding_window_pattern": 6, "num_hidden_layers": 6}
    facts |= {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0}
    return decoder("Gemma3", hidden, heads, kv_heads, 256, **facts)


def deepseek(
    version: str, hidden: int, heads: int, query_rank: int | None, **more: Any
) -> dict[str, Any]:
    facts = {
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    }
    return decoder(f"Deepseek{version}", hidden, heads, heads, 64, **facts | more)


def gemma_4(hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    facts = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}
    facts |= {"num_hidden_layers": 4, "global_head_dim": 512, "hidden_size_per_layer_input": 0}
    facts |= {"final_logit_softcapping": 30.0}
    return decoder("Gemma4", hidden, heads, kv_heads, 256, **(facts | more))


def lfm_2(hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    facts = {"norm_eps": 1e-5, "conv_L_cache": 3, "full_attn_idxs": [1]}
    return decoder("Lfm2", hidden, heads, 8, **facts | more)


def granite_4(
    hidden: int, heads: int, kv_heads: int, mamba_heads: int, **more: Any
) -> dict[str, Any]:
    facts = {
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "nope",
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "residual_multiplier": 0.22,
    }
    return decoder("GraniteMoeHybrid", hidden, heads, kv_heads, **facts | more)


def hybrid(name: str, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return a config of Qwen's models with gated delta nets."""
    facts = {"num_hidden_layers": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25}
    facts |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    facts |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    return decoder(name, hidden, heads, kv_heads, 256, **(facts | experts | more))


def encoder(architecture: str, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    facts = {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    return SMALL | facts | more


VISION = {"hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 2}
QWEN_VISION = {"depth": 2, "num_heads": 16, "intermediate_size": 64, "out_hidden_size": 2048}
PUBLISHED: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 2,
        "n_positions": 1024,
        "vocab_size": 640,
        "layer_norm_epsilon": 1e-5,
    },
    "pythia-1.4b": decoder("GPTNeoX", 2048, 16, 16, layer_norm_eps=1e-5),
    "Llama-2-7b": decoder("Llama", 4096, 32, 32),
    "Llama-3.2-1B": decoder("Llama", 2048, 32, 8),
    "Llama-3.2-3B": decoder("Llama", 3072, 24, 8),
    "TinyLlama-1.1B": decoder("Llama", 2048, 32, 4),
    "open_llama_3b": decoder("Llama", 3200, 32, 32),
    "SmolVLM-256M": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "text_config": decoder("Llama", 576, 9, 3),
        "vision_config": VISION | {"image_size": 512, "num_attention_heads": 12, "patch_size": 16},
        "scale_factor": 4,
    },
    "llava-v1.6-mistral-7b": {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "text_config": decoder("Mistral", 4096, 32, 8, sliding_window=None, model_type="mistral"),
        "vision_config": VISION
        | {"hidden_size": 1024, "image_size": 336}
        | {"num_attention_heads": 16, "patch_size": 14},
    },
    "llava-onevision-qwen2-0.5b": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "text_config": decoder("Qwen2", 896, 14, 2, model_type="qwen2"),
        "vision_config": VISION
        | {"hidden_size": 1152, "image_size": 384}
        | {"num_attention_heads": 16, "patch_size": 14},
    },
    "Qwen2.5-VL-3B": decoder("Qwen2", 2048, 16, 2)
    | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    | {"vision_config": QWEN_VISION | {"hidden_size": 1280}},
    "Qwen3-VL-2B": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": decoder("Qwen3", 2048, 16, 8, 128, model_type="qwen3_vl_text")
        | {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        "vision_config": QWEN_VISION | {"hidden_size": 1024, "deepstack_visual_indexes": [0, 1]},
    },
    "Mistral-7B-v0.1": decoder("Mistral", 4096, 32, 8, sliding_window=4096),
    "h2o-danube-1.8b": decoder("Mistral", 2560, 32, 8, sliding_window=4096),
    "Ministral-3-8B": decoder("Ministral3", 4096, 32, 8, 128, sliding_window=None),
    "Mixtral-8x7B-v0.1": decoder(
        "Mixtral", 4096, 32, 8, sliding_window=None, num_local_experts=8, num_experts_per_tok=2
    ),
    "Qwen2.5-0.5B": decoder("Qwen2", 896, 14, 2),
    "Qwen2.5-1.5B": decoder("Qwen2", 1536, 12, 2),
    "Qwen2.5-7B": decoder("Qwen2", 3584, 28, 4),
    "Qwen1.5-MoE-A2.7B": decoder(
        "Qwen2Moe",
        *(2048, 16, 16),
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=256,
    ),
    "Qwen3-8B": decoder("Qwen3", 4096, 32, 8, 128),
    "Qwen3-14B": decoder("Qwen3", 5120, 40, 8, 128),
    "Qwen3-Reranker-0.6B-seq-cls": decoder("Qwen3", 1024, 16, 8, 128)
    | {"architectures": ["Qwen3ForSequenceClassification"]},
    "Qwen3-30B-A3B": decoder(
        "Qwen3Moe",
        *(2048, 32, 4, 128),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=64,
    ),
    "Qwen3-Next-80B-A3B": hybrid("Qwen3Next", 2048, 16, 2, num_experts=512, num_experts_per_tok=10),
    "Qwen3.5-9B": hybrid("Qwen3_5", 4096, 16, 4),
    "Qwen3.5-35B-A3B": hybrid("Qwen3_5Moe", 2048, 16, 2, num_experts=256, num_experts_per_tok=8),
    "gemma-2b": decoder("Gemma", 2048, 8, 1, 256),
    "gemma-7b": decoder("Gemma", 3072, 16, 16, 256),
    "gemma-3-1b": gemma_3(1152, 4, 1, 512),
    "gemma-3-4b": gemma_3(2560, 8, 4, 1024),
    "c4ai-command-r-v01": decoder("Cohere", 8192, 64, 64),
    "c4ai-command-r7b": decoder("Cohere2", 4096, 32, 8, sliding_window=4096, num_hidden_layers=4),
    "EXAONE-4.0-1.2B": decoder("Exaone4", 2048, 32, 8, sliding_window=None),
    "EXAONE-4.0-32B": decoder(
        "Exaone4",
        *(5120, 40, 8, 128),
        num_hidden_layers=4,
        sliding_window=4096,
        sliding_window_pattern="LLLG",
    ),
    "glm-4-9b-chat": decoder("Glm", 4096, 32, 2, 128),
    "GLM-4-9B-0414": decoder("Glm4", 4096, 32, 2, 128),
    "GLM-4-32B-0414": decoder("Glm4", 6144, 48, 8, 128, attention_bias=False),
    "starcoder2-3b": decoder("Starcoder2", 3072, 24, 2, sliding_window=4096, norm_epsilon=1e-5),
    "starcoder2-15b": decoder("Starcoder2", 6144, 48, 4, sliding_window=4096, norm_epsilon=1e-5),
    "Seed-OSS-36B": decoder("SeedOss", 5120, 80, 8, 128),
    "AFM-4.5B": decoder("Arcee", 2560, 20, 4, 128, hidden_act="relu2"),
    "OLMoE-1B-7B": decoder(
        "Olmoe", 2048, 16, 16, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False
    ),
    "granite-3.1-1b-a400m": decoder(
        "GraniteMoe", 1024, 16, 8, num_local_experts=32, num_experts_per_tok=8
    ),
    "stablelm-3b-4e1t": decoder("StableLm", 2560, 32, 32, layer_norm_eps=1e-5),
    "stablelm-2-1_6b": decoder("StableLm", 2048, 32, 32, layer_norm_eps=1e-5, use_qkv_bias=True),
    "stablelm-2-12b": decoder(
        "StableLm",
        *(5120, 32, 8),
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
        qk_layernorm=True,
    ),
    "gemma-4-E2B": gemma_4(
        *(1536, 8, 1),
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=640,
    ),
    "gemma-4-31B": gemma_4(
        *(5376, 32, 16),
        sliding_window=1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
    ),
    "granite-3.3-8b": decoder("Granite", 4096, 32, 8, residual_multiplier=0.22),
    "granite-4.0-h-micro": granite_4(2048, 32, 8, 64),
    "granite-4.0-h-tiny": granite_4(1536, 12, 4, 48, num_local_experts=64, num_experts_per_tok=6),
    "granite-4.0-h-small": granite_4(
        4096, 32, 8, 128, num_local_experts=72, num_experts_per_tok=10
    ),
    "LFM2-350M": lfm_2(1024, 16),
    "LFM2-700M": lfm_2(1536, 24),
    "LFM2-1.2B": lfm_2(2048, 32),
    "LFM2-2.6B": lfm_2(2048, 32),
    "LFM2-8B-A1B": decoder(
        "Lfm2Moe",
        *(2048, 32, 8),
        norm_eps=1e-5,
        conv_L_cache=3,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    ),
    "OLMo-2-7B": decoder("Olmo2", 4096, 32, 32),
    "OLMo-3-7B": decoder("Olmo3", 4096, 32, 32, sliding_window=4096, num_hidden_layers=4),
    "SmolLM3-3B": decoder("SmolLM3", 2048, 16, 4, no_rope_layer_interval=2),
    "Phi-3-mini-4k": decoder("Phi3", 3072, 32, 32, sliding_window=2047),
    "Phi-4-mini": decoder("Phi3", 3072, 24, 8, partial_rotary_factor=0.75),
    "gpt-oss-20b": decoder(
        "GptOss",
        *(2880, 64, 8, 64),
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "DeepSeek-V2-Lite": deepseek("V2", 2048, 16, None, n_routed_experts=64, num_experts_per_tok=6),
    "DeepSeek-V3": deepseek(
        "V3",
        *(7168, 128, 1536),
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
    ),
    "nanochat-d20": decoder("NanoChat", 1280, 10, 10, hidden_act="relu2"),
    "bert-base": encoder("BertModel", 768, 12),
    "all-MiniLM-L6": encoder("BertModel", 384, 12),
    "roberta-base": encoder("RobertaModel", 768, 12, max_position_embeddings=514),
    "bge-m3": encoder("XLMRobertaModel", 1024, 16, max_position_embeddings=8194),
    "mpnet-base": encoder("MPNetModel", 768, 12, max_position_embeddings=514),
    "roformer-base": encoder("RoFormerModel", 768, 12),
    "nomic-embed-text-v1.5": encoder("NomicBertModel", 768, 12, max_position_embeddings=2048),
    "gte-multilingual-base": encoder("GteModel", 768, 12, max_position_embeddings=8192),
    "jina-embeddings-v3": encoder("JinaEmbeddingsV3Model", 1024, 16, max_position_embeddings=8194),
    "ModernBERT-base": encoder(
        "ModernBertModel", 768, 12, max_position_embeddings=8192, norm_eps=1e-5
    ),
    "embeddinggemma-300m": gemma_3(768, 3, 1, 512)
    | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
    "distilbert-base": {
        "architectures": ["DistilBertModel"],
        "dim": 768,
        "hidden_dim": 64,
        "n_heads": 12,
        "n_layers": 2,
        "vocab_size": 640,
        "max_position_embeddings": 512,
    },
    "t5-small": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 512,
        "d_ff": 64,
        "d_kv": 64,
        "num_heads": 8,
        "num_layers": 1,
        "vocab_size": 640,
        "layer_norm_epsilon": 1e-6,
    },
    "opus-mt": {
        "architectures": ["MarianMTModel"],
        "d_model": 512,
        "vocab_size": 640,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "max_position_embeddings": 512,
        "static_position_embeddings": True,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": 1,
    },
}


def attention_specs(name: str) -> Iterator[AttentionSpec]:
    """Yield the spec of every kind of attention layer in this model, including its encoder."""
    config = PUBLISHED[name]
    _, _, build = model_class(config)
    with torch.device("meta"):
        model = build(config, max_positions=512, dtype=torch.bfloat16)
    yield from {m.spec: None for m in model.modules() if isinstance(m, Attention)}
