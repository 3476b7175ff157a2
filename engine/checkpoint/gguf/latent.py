"""DeepSeek-V2 and V3 in GGUF files: latent attention, experts in groups, and shared experts.

The converter splits the weights that expand a latent to keys and to values, and transposes those of
the keys; it then counts one key/value head, whose keys are rows of the cache. Older files have
`attn_kv_b`, as the checkpoint, and the sizes of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import ConfigError

Shape = tuple[int, ...]
Settings = Mapping[str, Any]
LATENT = "deepseek2"
ROTATED, ROUTING = "rope.dimension_count", "expert_gating_func"
LEADING_DENSE = "leading_dense_block_count"
MLA = ("attention.key_length_mla", "attention.value_length_mla")  # of files with split weights
NEEDED = (
    "expert_shared_count",
    "attention.key_length",
    "attention.value_length",
    "attention.kv_lora_rank",
    ROTATED,
)
SIZES = (*NEEDED, *MLA, "attention.q_lora_rank")  # whole numbers above 0
GROUPS = ("expert_group_count", "expert_group_used_count")
SCALE, RENORMALISES = "expert_weights_scale", "expert_weights_norm"
MULTIPLIER = "rope.scaling.yarn_log_multiplier"  # a tenth of mscale_all_dim
KEYS = (
    *SIZES,
    *GROUPS,
    *(ROUTING, LEADING_DENSE, SCALE, RENORMALISES),
    *("expert_feed_forward_length", "nextn_predict_layers"),
    *("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", MULTIPLIER),
    "rope.scaling.original_context_length",
)
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of these kinds of routing
CHOICE_BIAS = "exp_probs_b.bias"
NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
WHOLE_NAMES = {CHOICE_BIAS: "mlp.gate.e_score_correction_bias"}
JOINED: dict[str, tuple[str, ...]] = {"attn_k_b": ("attn_k_b", "attn_v_b")}  # head by head


def check_routing(own: Settings) -> None:
    """Raise ConfigError if a setting that may be 0 is malformed, or one of MLA is missing."""
    for key, other in (MLA, MLA[::-1]):
        if key in own and other not in own:
            raise ConfigError(f"The GGUF file lacks {LATENT}.{other}; convert the model again.")
    kinds = {
        **dict.fromkeys((LEADING_DENSE, *GROUPS), (int,)),
        SCALE: (int, float),
        RENORMALISES: (bool,),
    }
    for key, allowed in kinds.items():
        given = own.get(key, allowed[0]())
        if type(given) not in allowed or not 0 <= given < 2**31:
            raise ConfigError(
                f"The GGUF file has {LATENT}.{key} = {given!r:.99}; it must be a number from 0 "
                "on, whole for a count, and true or false for a choice."
            )


def latent_config(name: str, own: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Return the sizes of latents and heads, and how experts are scored and chosen.

    Raises ConfigError for a routing that is not served.
    """
    plain, rotated, value = _head_sizes(own)
    _check_cached(name, own)
    is_sigmoid = scores_by_sigmoid(name, own, tensors)
    renormalises = own.get(RENORMALISES, False)
    if renormalises and not is_sigmoid:
        raise ConfigError(
            f"The GGUF file has {name}.{RENORMALISES} = True for scores by softmax. Penstock "
            "serves DeepSeek-V2, which does not renormalise, and DeepSeek-V3, whose scores are "
            f"sigmoids ({ROUTING} {SIGMOID})."
        )
    groups = own.get(GROUPS[0]) or 1
    config = {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
        "topk_method": "noaux_tc",
        "n_group": groups,
        "topk_group": own.get(GROUPS[1]) if groups > 1 else 1,
        "norm_topk_prob": renormalises,
        "routed_scaling_factor": own.get(SCALE) or 1.0,
        "num_key_value_heads": own["attention.head_count"],
        "head_dim": rotated,
        "q_lora_rank": own.get("attention.q_lora_rank"),
        "kv_lora_rank": own["attention.kv_lora_rank"],
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "first_k_dense_replace": own.get(LEADING_DENSE, 0),
        "n_routed_experts": own["expert_count"],
        "num_experts_per_tok": own["expert_used_count"],
        "moe_intermediate_size": own["expert_feed_forward_length"],
        "n_shared_experts": own["expert_shared_count"],
    }
    if not is_sigmoid:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return config


def scores_by_sigmoid(name: str, own: Settings, tensors: Collection[str]) -> bool:
    """Return whether scores of experts are sigmoids, else softmax probabilities.

    Without the setting they are sigmoids if the file has V3's bias for the choice. llama.cpp takes
    softmax for it. Raises ConfigError if setting and tensors do not fit a model that is served.
    """
    has_bias = any(tensor.endswith(f".{CHOICE_BIAS}") for tensor in tensors)
    given = own.get(ROUTING) or (SIGMOID if has_bias else SOFTMAX)
    if given not in (SOFTMAX, SIGMOID):
        raise ConfigError(
            f"The GGUF file has {name}.{ROUTING} = {given!r:.99}; served are {SOFTMAX}, softmax, "
            f"and {SIGMOID}, sigmoids."
        )
    if has_bias != (given == SIGMOID):
        found = "has" if has_bias else "lacks"
        raise ConfigError(
            f"The GGUF file has {name}.{ROUTING} = {given}, but {found} the tensors {CHOICE_BIAS}. "
            f"Penstock serves DeepSeek-V2 (softmax, {SOFTMAX}, without them) and DeepSeek-V3 "
            f"(sigmoids, {SIGMOID}, with them)."
        )
    return has_bias


def _check_cached(name: str, own: Settings) -> None:
    """Raise ConfigError if a file with split weights does not cache one latent for all heads."""
    heads, latent = own["attention.head_count"], own["attention.kv_lora_rank"]
    due = {"attention.head_count_kv": heads}
    if MLA[0] in own:
        due = {
            "attention.head_count_kv": 1,
            "attention.key_length": latent + own[ROTATED],
            "attention.value_length": latent,
        }
    for key, value in due.items():
        if own[key] != value:
            raise ConfigError(
                f"The GGUF file has {name}.{key} = {own[key]}; by its other settings it must be "
                f"{value}."
            )


def latent_notes(settings: Settings, tensors: Collection[str]) -> list[str]:
    """Return what the file leaves open, and Penstock decides by its tensors."""
    is_open = not settings.get(f"{LATENT}.{ROUTING}")
    is_latent = settings.get("general.architecture") == LATENT
    if is_latent and is_open and any(tensor.endswith(f".{CHOICE_BIAS}") for tensor in tensors):
        return [
            f"the file does not say how experts are scored ({LATENT}.{ROUTING}): by sigmoids, as "
            f"it has {CHOICE_BIAS} of DeepSeek-V3; llama.cpp takes softmax, which is wrong for it"
        ]
    return []


def latent_block(
    name: str, own: Settings, plain: dict[str, Shape], number: int
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the tensors that block `number` must have, and those it may, from those of Llama's."""
    hidden, heads = own["embedding_length"], own["attention.head_count"]
    latent, rank = own["attention.kv_lora_rank"], own.get("attention.q_lora_rank")
    key, rotated, value = _head_sizes(own)
    queries = heads * (key + rotated)
    parts: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_kv_a_mqa": (latent + rotated, hidden),
        "attn_kv_a_norm": (latent,),
        "attn_output": (hidden, heads * value),
        "ffn_norm": (hidden,),
    }
    if rank is None:
        parts["attn_q"] = (queries, hidden)
    else:
        parts |= {
            "attn_q_a": (rank, hidden),
            "attn_q_a_norm": (rank,),
            "attn_q_b": (queries, rank),
        }
    if MLA[0] in own:
        parts |= {"attn_k_b": (heads, latent, key), "attn_v_b": (heads, value, latent)}
    else:
        parts["attn_kv_b"] = (heads * (key + value), latent)
    if number < own.get(LEADING_DENSE, 0):
        parts |= {part: plain[f"{part}.weight"] for part in ("ffn_gate", "ffn_up", "ffn_down")}
        return _weights(parts), {}
    count, inner = own["expert_count"], own["expert_feed_forward_length"]
    shared = inner * own["expert_shared_count"]
    parts |= {
        "ffn_gate_inp": (count, hidden),
        "ffn_gate_exps": (count, inner, hidden),
        "ffn_up_exps": (count, inner, hidden),
        "ffn_down_exps": (count, hidden, inner),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }
    return _weights(parts), {CHOICE_BIAS: (count,)}


def _weights(parts: dict[str, Shape]) -> dict[str, Shape]:
    return {f"{part}.weight": shape for part, shape in parts.items()}


def _head_sizes(own: Settings) -> tuple[int, int, int]:
    """Return the unrotated and the rotated dimensions of a head's keys, and those of its values.

    Raises ConfigError if they do not fit.
    """
    keys = own.get(MLA[0], own["attention.key_length"])
    value = own.get(MLA[1], own["attention.value_length"])
    rotated = own[ROTATED]
    if not rotated < keys:
        raise ConfigError(
            f"The GGUF file has {ROTATED} {rotated}, which must be below the {keys} dimensions of "
            "a key."
        )
    return keys - rotated, rotated, value
