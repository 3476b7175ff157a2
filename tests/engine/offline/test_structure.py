"""A model's structure against transformers' count of parameters, and against drawings by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from engine.models.qwen3_5 import Qwen35
from engine.models.registry import model_class
from engine.offline.structure import structure_of
from engine.protocol.structure import ModelBox, ModelStructure

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
GEMMA = {**LLAMA, "sliding_window": 16, "query_pre_attn_scalar": 16}
GEMMA4 = {
    **LLAMA,
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
SHARED = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 3,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
BERT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# transformers refuses special tokens outside of the vocabulary.
IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id")
MODERN = dict.fromkeys(IDS, 1)
POOLED = ("BertModel", "RobertaModel", "MPNetModel", "JinaEmbeddingsV3Model")
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
MARIAN = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
DEEPSEEK = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
KINDS = ["conv", "full_attention", "conv", "conv"]
LFM2 = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"layer_types": KINDS}
GRANITE_HYBRID = LFM2 | {
    "layer_types": ["mamba" if kind == "conv" else "attention" for kind in KINDS],
    "shared_intermediate_size": 40,
    "num_local_experts": 3,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
HYBRID = LLAMA | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
HF: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt-neox": ("GPTNeoXForCausalLM", BERT),
    "llama": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": False}),
    "llama tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 16}),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in LLAMA.items() if k != "head_dim"}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "qwen3_next": ("Qwen3NextForCausalLM", HYBRID | EXPERTS),
    "qwen3_5": ("Qwen3_5ForCausalLM", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", HYBRID | EXPERTS),
    "gemma": ("GemmaForCausalLM", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", GEMMA | {"num_hidden_layers": 7}),
    "gemma4": ("Gemma4ForCausalLM", GEMMA4),
    "gemma4 shared": ("Gemma4ForCausalLM", GEMMA4 | SHARED),
    "gemma4 experts": ("Gemma4ForCausalLM", GEMMA4 | EXPERTS),
    "granite": ("GraniteForCausalLM", LLAMA | {"residual_multiplier": 0.5}),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", GRANITE_HYBRID),
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "smollm3": ("SmolLM3ForCausalLM", LLAMA | {"pad_token_id": None}),
    "phi3": ("Phi3ForCausalLM", LLAMA | {"pad_token_id": None, "partial_rotary_factor": 0.5}),
    "nanochat": ("NanoChatForCausalLM", {k: v for k, v in LLAMA.items() if k != "head_dim"}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK | {"q_lora_rank": 20}),
    "bert": ("BertModel", BERT),
    "roformer": ("RoFormerModel", BERT | {"embedding_size": 16}),
    "roberta": ("RobertaModel", BERT),
    "distilbert": ("DistilBertModel", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "mpnet": ("MPNetModel", BERT),
    "modernbert": ("ModernBertModel", BERT | MODERN),
    "nomic_bert": ("NomicBertModel", BERT),
    "gte": ("GteModel", BERT),
    "jina_v3": ("JinaEmbeddingsV3Model", BERT),
    "embedding_gemma": ("Gemma3TextModel", GEMMA | {"use_bidirectional_attention": True}),
    "t5": ("T5ForConditionalGeneration", T5 | {"tie_word_embeddings": True}),
    "marian": ("MarianMTModel", MARIAN),
}


def structure(config: dict[str, Any]) -> ModelStructure:
    _, _, build = model_class(config)
    with torch.device("meta"):
        return structure_of(build(config, max_positions=64, dtype=torch.float32))


def of_transformers(name: str) -> tuple[ModelStructure, int]:
    """Return the structure of a model, and transformers' count of its parameters."""
    class_name, fields = HF[name]
    kind = getattr(transformers, class_name)
    config = kind.config_class(**fields)
    config.architectures = [class_name]
    more = {"add_pooling_layer": False} if class_name in POOLED else {}
    with torch.device("meta"):
        model = kind(config, **more)
    count = model.num_parameters(only_trainable=True)  # sinusoids are no parameters of ours
    if name.startswith("gemma4"):
        count += config.num_hidden_layers  # layer_scalar, which is a buffer there
    if name == "deepseek_v3":
        count += 4 * (config.num_hidden_layers - 1)  # e_score_correction_bias, likewise
    if name == "marian":
        count += config.vocab_size  # final_logits_bias, which is a buffer there
    return structure(config.to_dict()), count


def repeats(boxes: tuple[ModelBox, ...], box: ModelBox) -> int:
    """How many blocks this box stands for; 1 outside of blocks."""
    counts = [len(b.layers) for b in boxes if b.layers and f"{box.name}.".startswith(f"{b.name}.")]
    return counts[0] if counts else 1


def total(boxes: tuple[ModelBox, ...]) -> int:
    return sum(box.parameters * repeats(boxes, box) for box in boxes)


@pytest.mark.parametrize("name", HF)
@pytest.mark.variants(5)
def test_structure_parameters_sum_to_those_of_transformers(name: str) -> None:
    found, count = of_transformers(name)
    assert total(found.boxes) == count
    assert all(max(box.inputs, default=-1) < len(found.boxes) for box in found.boxes)


NANOCHAT = {
    **LLAMA,
    "architectures": ["NanoChatForCausalLM"],
    "hidden_act": "relu2",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 20.0,
    "qk_scale": 1.2,
    "layer_windows": [16, 16, 16, None],
    "residual_lambdas": True,
    "value_layers": [1, 3],
    "value_gate_channels": 12,
    "value_gate_range": 3.0,
    "smear_channels": 24,
    "backout_layer": 2,
}


def test_structure_of_nanochat_has_two_kinds_of_blocks_and_all_scalars() -> None:
    found = structure(NANOCHAT)
    vocabulary, hidden, heads, kv_heads, dim, layers = 96, 32, 4, 2, 16, 4
    attention = hidden * (2 * heads + 2 * kv_heads) * dim
    values = 12 * kv_heads + vocabulary * kv_heads * dim
    mlp = 2 * hidden * LLAMA["intermediate_size"]
    scalars = 2 * layers + 24 + 1 + 1  # two for each layer; smear's gate and factor; backout
    expected = 2 * vocabulary * hidden + layers * (attention + mlp) + 2 * values + scalars
    assert total(found.boxes) == expected
    assert {box.name: box.layers for box in found.boxes if box.layers} == {
        "blocks.0": (0, 2),
        "blocks.1": (1, 3),
    }


def flow(found: ModelStructure, block: str) -> list[str]:
    """Return the parts of a block in order. An addition has what it adds behind it."""
    names = {index: box.name for index, box in enumerate(found.boxes)}

    def short(name: str) -> str:
        return "add" if ".add " in name else name.removeprefix(f"{block}.")

    parts = []
    for box in found.boxes:
        inside = box.name.removeprefix(f"{block}.")
        if inside == box.name or "." in inside:
            continue
        if box.kind == "add":
            first, second = (short(names[index]) for index in box.inputs)
            parts.append(f"{first} + {second}")
        else:
            parts.append(inside)
    return parts


def test_structure_of_a_pre_norm_block_joins_around_the_norm() -> None:
    found, _ = of_transformers("llama")
    attention, mlp = ["attention_norm", "attention"], ["mlp_norm", "mlp"]
    expected = [*attention, "embed + attention", *mlp, "add + mlp"]
    assert flow(found, "blocks.0") == expected


def test_structure_of_granite_4_joins_its_layers_and_the_shared_mlp() -> None:
    found, _ = of_transformers("granite-hybrid")
    boxes = {box.name: index for index, box in enumerate(found.boxes)}
    blocks = [box for box in found.boxes if box.layers]
    assert [box.layers for box in blocks] == [(0, 2, 3), (1,)]
    joined = [(box.name.split(".add")[0], box.inputs) for box in found.boxes if box.kind == "add"]
    chosen = boxes["blocks.0.mlp.router"], boxes["blocks.0.mlp.expert_down"]
    mlp = [inputs for name, inputs in joined if name == "blocks.0.mlp"]
    assert mlp == [(*chosen, boxes["blocks.0.mlp.shared"])]
    recurrent = boxes["blocks.0.recurrent"]
    assert any(recurrent in inputs for name, inputs in joined if name == "blocks.0")


def test_structure_of_gemma_2_norms_before_and_after_each_sublayer() -> None:
    found, _ = of_transformers("gemma2")
    assert flow(found, "blocks.0") == [
        *("attention_norm", "attention", "attention_post_norm", "embed + attention_post_norm"),
        *("mlp_norm", "mlp", "mlp_post_norm", "add + mlp_post_norm"),
    ]


def test_structure_of_olmo_2_norms_only_after_each_sublayer() -> None:
    found, _ = of_transformers("olmo2")
    assert flow(found, "blocks.0") == [
        *("attention", "attention_norm", "embed + attention_norm"),
        *("mlp", "mlp_norm", "add + mlp_norm"),
    ]


def test_structure_of_a_post_norm_block_joins_before_the_norm() -> None:
    found, _ = of_transformers("bert")
    assert flow(found, "blocks.0") == [
        *("qkv", "attend", "out", "norm + out", "attention_norm"),
        *("mlp", "attention_norm + mlp", "mlp_norm"),
    ]


def test_structure_of_an_encoder_decoder_reads_the_encoder_in_the_cross_attention() -> None:
    for name, last in (("t5", "encoder_norm"), ("marian", "encoder.0.mlp_norm")):
        found, _ = of_transformers(name)
        [kv] = [box for box in found.boxes if box.name == "decoder.0.cross.kv"]
        assert [found.boxes[index].name for index in kv.inputs] == [last]
        blocks = {box.name: box.layers for box in found.boxes if box.layers}
        assert blocks == {"encoder.0": (0, 1), "decoder.0": (0, 1, 2)}


@pytest.mark.parametrize(("name", "is_tied"), [("llama", False), ("llama tied", True)])
def test_structure_head_reads_the_embedding_if_it_is_tied(name: str, is_tied: bool) -> None:
    found, _ = of_transformers(name)
    head = found.boxes[-1]
    assert (head.kind, head.shape) == ("LMHead", (96,))
    assert (head.parameters == 0) == is_tied
    assert ("embed" in [found.boxes[index].name for index in head.inputs]) == is_tied


def test_structure_of_a_model_that_sees_has_its_tower() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tower = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    tower |= {"num_hidden_layers": 3, "image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = Gemma3Config(text_config=GEMMA, vision_config=tower, mm_tokens_per_image=1)
    facts = config.to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    with torch.device("meta"):
        module = model_class(facts)[-1](facts, max_positions=64, dtype=torch.float32)
        expected = Gemma3ForConditionalGeneration(config).num_parameters()
    boxes = structure_of(module).boxes
    blocks = [box for box in boxes if box.name.startswith("vision.") and box.layers]
    assert [box.layers for box in blocks] == [(0, 1, 2)]
    assert total(boxes) == expected


def test_structure_has_the_prediction_head_if_it_drafts() -> None:
    config = transformers.Qwen3_5TextConfig(
        **LLAMA, layer_types=["linear_attention"] * 3 + ["full_attention"]
    ).to_dict()
    with torch.device("meta"):
        model = Qwen35(config, max_positions=64, dtype=torch.float32)
        head = model.prediction_head()
    parameters = sum(p.numel() for each in (model, head) for p in each.parameters())
    found = structure_of(model, head).boxes
    names = [box.name for box in found]
    assert total(found) == parameters
    (joins,) = [box for box in found if box.name == "mtp.join"]
    assert [names[index] for index in joins.inputs] == ["mtp.embedding_norm", "mtp.hidden_norm"]
    hidden = found[names.index("mtp.hidden_norm")]
    assert [names[index] for index in hidden.inputs] == ["norm"]
    assert [box.layers for box in found if box.name == "mtp.blocks.0"] == [(0,)]
    assert names[-1] == "head", "it shares the head of the model"


def test_structure_has_the_windows_and_softcaps_of_all_layers() -> None:
    found, _ = of_transformers("gemma2")
    assert [facts.window for facts in found.attention.values()] == [16, None, 16, None]
    assert {facts.softcap for facts in found.attention.values()} == {50.0}
    assert (found.boxes[-1].kind, found.boxes[-1].detail) == ("softcap", "30")
    found, _ = of_transformers("gemma3")
    windows = [facts.window for facts in found.attention.values()]
    assert windows == [16, 16, 16, 16, 16, None, 16]
    assert found.wavelengths.keys() == {"rotary", "local_rotary"}


def test_structure_wavelengths_are_those_of_the_paper() -> None:
    found, _ = of_transformers("llama")
    expected = [2 * math.pi * 10000 ** (2 * pair / 16) for pair in range(8)]
    assert found.wavelengths["rotary"] == pytest.approx(expected, rel=1e-5)
