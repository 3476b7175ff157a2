"""Configs and tensors of Granite and DeepSeek as llama.cpp's converter changes them.

The names are those that PyPI's `gguf` maps to the names in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, np.ndarray]


def granite_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Store the settings of Granite, and return a config of the others."""
    experts = config.get("num_local_experts", 0)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    if "layer_types" not in config:
        return config | {"num_experts": experts}
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    return config | {
        "num_key_value_heads": [config["num_key_value_heads"] * each for each in attends],
        "intermediate_size": config["intermediate_size" if experts else "shared_intermediate_size"],
        "shared_expert_intermediate_size": config["shared_intermediate_size"],
        "num_experts": experts,
    }


def granite_tensors(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Tensors:
    """Take gates and ups apart, and change the tensors of Mamba-2 and the order of rows."""
    shared = "mlp.shared_expert." if config.get("num_local_experts") else "mlp."
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found: Tensors = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        experts = "mlp.experts." if "block_sparse_moe" in name else shared
        layer = name.partition("shared_mlp.")[0].partition("block_sparse_moe.")[0]
        if part == "input_linear":
            gate, up = np.split(tensor, 2, axis=-2)
            found[f"{layer}{experts}gate_proj.weight"] = gate
            found[f"{layer}{experts}up_proj.weight"] = up
        elif part == "output_linear":
            found[f"{layer}{experts}down_proj.weight"] = tensor
        elif part == "A_log":
            found[name] = -np.exp(tensor)[:, None]
        elif part == "D":
            found[name] = tensor[:, None]
        elif part == "conv1d":
            found[name] = tensor.squeeze(1) if tensor.ndim == 3 else tensor
        elif name.endswith("mamba.norm.weight"):
            found[name] = tensor.reshape(config["mamba_n_groups"], -1)
        elif part in heads:
            halves = tensor.reshape(config[heads[part]], 2, -1, *tensor.shape[1:])
            found[name] = halves.swapaxes(1, 2).reshape(tensor.shape)
        else:
            found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def latent_config(
    writer: gguf.GGUFWriter, config: dict[str, Any], *, is_old: bool = False
) -> dict[str, Any]:
    """Store the settings of DeepSeek, and return a config of the others.

    Old files have the sizes of a head, and neither groups nor the kind of scores.
    """
    rotated, value = config["qk_rope_head_dim"], config["v_head_dim"]
    key, latent = config["qk_nope_head_dim"] + rotated, config["kv_lora_rank"]
    is_v3 = config["model_type"] == "deepseek_v3"
    kind = gguf.ExpertGatingFuncType
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(key if is_old else latent + rotated)
    writer.add_value_length(value if is_old else latent)
    if not is_old:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(kind.SIGMOID if is_v3 else kind.SOFTMAX)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if is_v3 and config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(rotated)
    rope = dict(config["rope_parameters"])
    if "mscale_all_dim" in rope:
        rope["mscale_all_dim"] *= 0.1
    kv_heads = config["num_attention_heads"] if is_old else 1
    return config | {"head_dim": None, "num_key_value_heads": kv_heads, "rope_parameters": rope}


def latent_tensors(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], *, is_old: bool = False
) -> Tensors:
    """Split the weights of keys and values, and transpose those of keys."""
    sizes = config["qk_nope_head_dim"], config["v_head_dim"]
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight") and not is_old:
            heads = tensor.reshape(config["num_attention_heads"], sum(sizes), -1)
            keys, values = np.split(heads, sizes[:1], axis=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = values
        else:
            found[name.replace("correction_bias", "correction.bias")] = tensor
    return found
