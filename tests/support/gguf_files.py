"""Write GGUF files with PyPI's `gguf`, as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support import gguf_converted as by_converter
from tests.support import gguf_llamas as llamas
from tests.support.tiny_gguf import add_setting

NORMAL, CONTROL, BYTE = 1, 3, 6
# The config's key -> the method of GGUFWriter that stores it.
SETTINGS = {
    "num_hidden_layers": "add_block_count",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "head_dim": "add_key_length",
    "max_position_embeddings": "add_context_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "n_layer": "add_block_count",
    "n_embd": "add_embedding_length",
    "n_inner": "add_feed_forward_length",
    "n_head": "add_head_count",
    "n_positions": "add_context_length",
    "layer_norm_epsilon": "add_layer_norm_eps",
    "layer_norm_eps": "add_layer_norm_eps",
    "norm_epsilon": "add_layer_norm_eps",
    "norm_eps": "add_layer_norm_rms_eps",
    "conv_L_cache": "add_shortconv_l_cache",
    "num_dense_layers": "add_leading_dense_block_count",
    "use_parallel_residual": "add_parallel_residual",
    "logit_scale": "add_logit_scale",
    "num_experts": "add_expert_count",
    "num_local_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "add_ssm_conv_kernel",
    "linear_key_head_dim": "add_ssm_state_size",
    "linear_num_key_heads": "add_ssm_group_count",
    "linear_num_value_heads": "add_ssm_time_step_rank",
}


@cache
def name_map(architecture: gguf.MODEL_ARCH) -> gguf.TensorNameMap:
    """Return the names of an architecture's tensors; making the map takes 30 ms."""
    return gguf.get_tensor_name_map(architecture, 99)


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    kind: str = "F32",
    *,
    weights: bool = True,
    others: Mapping[str, str] | None = None,
    is_old: bool = False,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file whose matrices are of `kind`.

    `others` are the kinds of matrices that differ, by a part of their names. `is_old` is whether
    the file is one of DeepSeek from before April 2025. `settings` are more settings, and
    `more` those of the tokenizer. Its vocabulary is GPT-2's bytes and made-up tokens.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    if "conv_L_cache" in config:
        heads = config["num_key_value_heads"]
        config["num_key_value_heads"] = [heads * (kind != "conv") for kind in config["layer_types"]]
    if architecture == "lfm2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    original = config
    if architecture in GRANITES:
        config = by_converter.granite_config(writer, config)
    elif architecture in llamas.CHANGED:
        config = llamas.settings(writer, architecture, config)
    elif architecture == "deepseek2":
        config = by_converter.latent_config(writer, config, is_old=is_old)
    elif architecture == "gemma4":
        config = gemma4_settings(writer, config)
    for key, method in SETTINGS.items():
        if config.get(key) is not None:
            getattr(writer, method)(config[key])
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    if architecture != "gpt2":
        given = config.get("rope_parameters") or {}
        given = given.get("full_attention", given)
        writer.add_rope_freq_base(theta or given.get("rope_theta", 10000.0))
        if share := given.get("partial_rotary_factor"):
            heads = config["num_attention_heads"]
            width = config.get("head_dim") or config["hidden_size"] // heads
            writer.add_rope_dimension_count(int(width * share))
        if given.get("factor") is not None:
            add_scaling(writer, given, config)
    if architecture in DELTAS:
        add_delta(writer, architecture, config)
    for key, value in (settings or {}).items():
        add_setting(writer, key, value)
    add_tokenizer(writer, config["vocab_size"], **more)
    if architecture == "gemma4":
        writer.add_tensor("rope_freqs.weight", gemma4_factors(config))
    names = name_map(ARCHITECTURES[architecture])
    tensors = stacked(tensors_of(folder))
    if architecture in DELTAS:
        tensors = delta_tensors(tensors, architecture, config)
    elif architecture in GRANITES:
        tensors = by_converter.granite_tensors(tensors, original)
    elif architecture in llamas.CHANGED:
        tensors = llamas.tensors(tensors, architecture, config)
    elif architecture == "deepseek2":
        tensors = by_converter.latent_tensors(tensors, original, is_old=is_old)
    for name, tensor in tensors.items() if weights else ():
        # The converter gives the bias of LFM2's experts an ending, and Mixtral's names to them.
        known = name.replace(".expert_bias", ".expert_bias.bias")
        if ".feed_forward.experts." in name:
            known = name.removeprefix("model.")
        if ".block_sparse_moe.experts." in name:
            known = name.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj", ".layer_scalar")):
            known = f"{name}.weight"
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        if part := GEMMA4_SCALES.get(name.rpartition(".layers.")[2].partition(".")[2]):
            stored = f"blk.{name.split('.')[2]}.{part}"
        assert stored, name
        found = converted(name, tensor, architecture, config)
        own = next((other for part, other in (others or {}).items() if part in stored), kind)
        always_plain = ("norm.weight", "shared_expert_gate.weight", "conv1d.weight", "A_log", ".D")
        is_matrix = found.ndim > 1 and not name.endswith(always_plain)
        add_tensor(writer, stored, found, own if is_matrix else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gemma4_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Store what differs between the layers of Gemma 4. Return the config without it."""
    kinds, readers = config["layer_types"], config["num_kv_shared_layers"]
    slides = [kind == "sliding_attention" for kind in kinds]
    of_layers = {int(layer): each for layer, each in config["per_layer_config"].items()}
    last = of_layers[len(kinds) - 1]
    width, rope = config["head_dim"], config["rope_parameters"]
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(readers)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_value_length(last["head_dim"])
    writer.add_key_length_swa(width)
    writer.add_value_length_swa(width)
    writer.add_rope_dimension_count(last["head_dim"])
    writer.add_rope_dimension_count_swa(width)
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    heads = config["num_key_value_heads"]
    of_last = last.get("num_key_value_heads", heads)
    inner = config["intermediate_size"]
    wide = inner * (2 if config["use_double_wide_mlp"] else 1)
    full = {key: value for key, value in rope["full_attention"].items() if "partial" not in key}
    return config | {
        "head_dim": last["head_dim"],
        "num_key_value_heads": [heads if each else of_last for each in slides],
        "intermediate_size": [inner] * (len(kinds) - readers) + [wide] * readers,
        "final_logit_softcapping": config["final_logit_softcapping"] or 0.0,
        "num_experts_per_tok": config["top_k_experts"],
        "rope_parameters": full,
        "share": rope["full_attention"]["partial_rotary_factor"],
    }


def gemma4_factors(config: Mapping[str, Any]) -> np.ndarray:
    """Return what the frequencies of global layers are divided by."""
    pairs = config["head_dim"] // 2
    turning = int(config["head_dim"] * config["share"] / 2)
    return np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)


GEMMA4_SCALES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def add_delta(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    """Store the settings of gated delta nets that are no values of the config."""
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    writer.add_ssm_inner_size(values)
    recurs = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{architecture}.attention.recurrent_layers", recurs)
    writer.add_uint32(f"{architecture}.full_attention_interval", 4)
    if architecture != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def delta_tensors(
    tensors: Mapping[str, np.ndarray], architecture: str, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Change the tensors of gated delta nets, and the norms, as the converter does."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    each = values // keys
    first = 2 * keys * key_dim

    def tiled(x: np.ndarray) -> np.ndarray:
        """Order value heads along the first dimension: the first of each key head, and so on."""
        if architecture == "qwen3next":
            return x
        heads = x.reshape(keys, each, -1, *x.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(x.shape)

    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        x, part = tensor, name.partition(".linear_attn.")[2].partition(".")[0]
        if part in ("in_proj_qkv", "conv1d"):
            x = x.squeeze(1) if part == "conv1d" else x
            x = np.concatenate([x[:first], tiled(x[first:])])
        elif part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias"):
            x = tiled(x)
        elif part == "A_log":
            x = tiled(-np.exp(x))
        elif part == "out_proj":
            x = np.ascontiguousarray(tiled(x.T).T)
        elif part == "in_proj_qkvz":
            sizes = [key_dim, key_dim, each * value_dim, each * value_dim]
            heads = x.reshape(keys, sum(sizes), -1)
            split = np.split(heads, np.cumsum(sizes)[:-1], axis=1)
            *qkv, z = [piece.reshape(-1, x.shape[1]) for piece in split]
            found[name.replace("in_proj_qkvz", "in_proj_z")] = z
            name, x = name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
        elif name.endswith("norm.weight") and part != "norm":
            x = x + 1
        found[name.replace(".dt_bias", ".dt_proj.bias")] = x
    return found


DELTAS = ("qwen3next", "qwen35", "qwen35moe")
GRANITES = ("granite", "granitemoe", "granitehybrid")


def add_scaling(
    writer: gguf.GGUFWriter, given: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Store rotary scaling: as settings, or Llama 3's as the factor of each frequency."""
    if given["rope_type"] != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(given["rope_type"]))
        writer.add_rope_scaling_factor(given["factor"])
        for key, method in YARN.items():
            if given["rope_type"] == "yarn" and key in given:
                getattr(writer, method)(given[key])
        return
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    count = len(scaled)
    plain = given["rope_theta"] ** (-np.arange(count, dtype=np.float64) / count)
    writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))


YARN = {
    "original_max_position_embeddings": "add_rope_scaling_orig_ctx_len",
    "beta_fast": "add_rope_scaling_yarn_beta_fast",
    "beta_slow": "add_rope_scaling_yarn_beta_slow",
    "mscale_all_dim": "add_rope_scaling_yarn_log_mul",
    "llama_4_scaling_beta": "add_attn_temperature_scale",
}
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those of all experts of a layer as one, and norms of heads, too."""
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif match := HEAD_NORM.fullmatch(name):
            experts.setdefault(f"{match[1]}.weight", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    for name, each in experts.items():
        found[name] = np.stack([each[number] for number in range(len(each))])
    return found


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
HEAD_NORM = re.compile(r"(.*_layernorm)\.norms\.(\d+)\.weight")


def converted(
    name: str, tensor: np.ndarray, architecture: str, config: Mapping[str, Any]
) -> np.ndarray:
    """Change a tensor as the converter does."""
    heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    for part, key in heads.items():
        if architecture in ("llama", "mistral3", "arcee", "smollm3") and part in name:
            halves = tensor.reshape(config[key], 2, -1, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape)
    gemmas = ("gemma", "gemma2", "gemma3", "gemma-embedding")
    if architecture in gemmas and name.endswith("norm.weight"):
        return tensor + 1
    if name.endswith(".conv.conv.weight"):
        return tensor.squeeze(1)
    if architecture == "gpt2" and ".c_" in name and name.endswith(".weight"):
        return np.ascontiguousarray(tensor.T)
    return tensor


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    quantized = gguf.quants.quantize(np.ascontiguousarray(tensor, dtype=np.float32), number)
    writer.add_tensor(name, quantized, raw_dtype=number)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, **more: Any) -> None:
    from server.text.tokenizer import BYTE_ALPHABET

    alphabet = sorted(BYTE_ALPHABET)  # letters first
    tokens = [*alphabet[:100], "th", *alphabet[100:], "the", "Ġthe", "<|end|>"]
    tokens += [f"<{number}>" for number in range(vocab_size - len(tokens))]
    settings = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens[:vocab_size],
        "token_type": ([NORMAL] * (len(BYTE_ALPHABET) + 3) + [CONTROL] * vocab_size)[:vocab_size],
        "merges": ["t h", "th e", "Ġ the"] if vocab_size > len(BYTE_ALPHABET) + 3 else ["t h"],
        "eos_token_id": min(len(BYTE_ALPHABET) + 3, vocab_size - 1),
        **more,
    }
    for key, value in settings.items():
        add = writer.add_array if isinstance(value, list) else _ADD[type(value)](writer)
        add(f"tokenizer.ggml.{key}", value)


_ADD = {
    int: lambda writer: writer.add_uint32,
    str: lambda writer: writer.add_string,
    bool: lambda writer: writer.add_bool,
}
