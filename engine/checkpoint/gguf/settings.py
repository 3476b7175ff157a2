"""The settings of a GGUF file's architecture: computed, without effect, or refused by name.

llama.cpp reads fewer keys than its converter writes, and drops the others without a word. The keys
that it reads for each architecture were found by running it. docs/gguf.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.checkpoint.gguf import gemma4, granite, latent, llamas
from engine.checkpoint.gguf.gemma4 import GEMMA4, SLIDING_WIDTH
from engine.checkpoint.gguf.gpt_oss import GPT_OSS
from engine.checkpoint.gguf.granite import GRANITE
from engine.checkpoint.gguf.latent import LATENT
from engine.checkpoint.gguf.unread import NEUTRAL, READ, UNREAD, WIDTHS
from engine.errors import ConfigError

Settings = Mapping[str, Any]
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral3": "LlamaForCausalLM",  # unless it scales queries
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2vl": "Qwen2ForCausalLM",  # without an image encoder, as the next one
    "qwen3vl": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    GEMMA4: "Gemma4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",  # unless it has windows
    "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "glm4": "Glm4ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "qwen3next": "Qwen3_5MoeForCausalLM",  # the same computation; see delta.py
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    GRANITE: "GraniteMoeHybridForCausalLM",
    LATENT: "DeepseekV3ForCausalLM",  # or V2, by how experts are scored
    "bert": "BertModel",
    "nomic-bert": "NomicBertModel",
    "modern-bert": "ModernBertModel",
    "jina-bert-v3": "JinaEmbeddingsV3Model",
    "gemma-embedding": "Gemma3TextModel",
    GPT_OSS: "GptOssForCausalLM",
    **llamas.CLASSES,
}
COUNTS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
)
PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
ROPE = (
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
)
WINDOWS = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "final_logit_softcapping",
)
EXPERTS = ("expert_count", "expert_used_count")
EXPERT_SIZES = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
DELTAS = ("qwen3next", "qwen35", "qwen35moe")
MIXTURES = ("qwen2moe", "qwen3next", "qwen35moe")  # each layer also has a shared expert
WITH_EXPERTS = (*MIXTURES, "lfm2moe", "granitemoe", GRANITE, LATENT, GPT_OSS, *llamas.WITH_EXPERTS)
RECURRENT_LAYERS = "attention.recurrent_layers"  # llama.cpp's key for DELTAS
SSM = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
)
TEMPERATURE = "attention.temperature_scale"
YARN = (
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
BERTS = ("bert", "nomic-bert", "modern-bert", "jina-bert-v3")
ENCODERS = (*BERTS, "gemma-embedding")
LAYER_NORMED = ("command-r", "cohere2", "gpt2", "gptneox", "starcoder2", "stablelm", *BERTS)
ROTATED = "rope.dimension_count"
PARTLY_ROTATED = ("glm4", "stablelm", *DELTAS, *llamas.PARTLY_ROTATED)  # others rotate whole heads
EXAONE_LAYERS = 64  # of the model with windows
KV_HEADS = "attention.head_count_kv"
HYBRIDS = ("lfm2", "lfm2moe", GRANITE)  # a layer without key/value heads is recurrent
RECURRENT = "recurrent"  # whether each layer is; `own_settings` adds this list for HYBRIDS
L_CACHE = "shortconv.l_cache"
SECTIONS = "rope.dimension_sections"  # of positions in images; a text has the same in all
NUM_DEEP = "n_deepstack_layers"  # that add further embeddings of images
LEADING_DENSE, ROUTING = "leading_dense_block_count", "expert_gating_func"
PARALLEL = "use_parallel_residual"  # llama.cpp decides by the tensors
CAUSAL, HIDDEN_ACT = "attention.causal", "hidden_activation"
# Settings that llama.cpp needs besides COUNTS and the norm's.
NEEDED = {
    "cohere2": ("attention.sliding_window", "logit_scale"),
    "qwen2moe": EXPERTS,
    "lfm2": (L_CACHE,),
    "lfm2moe": (L_CACHE, *EXPERTS, EXPERT_SIZES[0], LEADING_DENSE, ROUTING),
    "qwen3next": (*SSM, *EXPERTS),
    "qwen35": SSM,
    "qwen35moe": (*SSM, *EXPERTS),
    GEMMA4: gemma4.NEEDED,
    "granite": ("logit_scale",),
    "granitemoe": (*EXPERTS, "logit_scale"),
    GRANITE: SSM,
    LATENT: (*EXPERTS, EXPERT_SIZES[0], *latent.NEEDED),
    **dict.fromkeys(BERTS, (CAUSAL,)),
    "gemma-embedding": WINDOWS[:1],
    GPT_OSS: (*EXPERTS, EXPERT_SIZES[0], WINDOWS[0]),
    **llamas.NEEDED,
}
KEY_WIDTHS = ("attention.key_length", SLIDING_WIDTH)
# Of the models in engine/models.
LIMITS = {"block_count": 10_000, **dict.fromkeys(KEY_WIDTHS, 2**16)}
ALL = (*COUNTS, "attention.head_count_kv", "attention.key_length")
DRAFTING = "nextn_predict_layers"  # behind the others; they draft tokens, and are not served
DELTA_KEYS = (
    DRAFTING,
    *EXPERTS,
    *EXPERT_SIZES,
    "full_attention_interval",
    SECTIONS,
)
COMPUTED = {
    "llama": (*ALL, *ROPE, RMS, *EXPERTS),  # with experts, it is Mixtral
    **dict.fromkeys(("qwen2", "qwen3", "gemma"), (*ALL, *ROPE, RMS)),
    **dict.fromkeys(("qwen2vl", "qwen3vl"), (*ALL, *ROPE, RMS, SECTIONS, NUM_DEEP)),
    "mistral3": (*ALL, *ROPE, RMS, TEMPERATURE, *YARN),
    "qwen2moe": (*ALL, *ROPE, RMS, *EXPERTS, *EXPERT_SIZES),
    "olmo2": (*ALL, *ROPE, RMS, *WINDOWS[:3]),
    "command-r": (*ALL, *ROPE, LAYER_NORM, "logit_scale"),
    "cohere2": (*ALL, *ROPE, LAYER_NORM, "logit_scale", *WINDOWS[:3]),
    "gemma2": (*ALL, *ROPE, RMS, *WINDOWS, "attn_logit_softcapping"),
    "gemma3": (*ALL, *ROPE, RMS, *WINDOWS),
    GEMMA4: (*ALL, *ROPE, RMS, *WINDOWS, *gemma4.KEYS),
    "gpt2": (*ALL, LAYER_NORM),
    "glm4": (*ALL, *ROPE, RMS, ROTATED),
    "exaone4": (*ALL, *ROPE, RMS, *WINDOWS[:3]),
    "starcoder2": (*ALL, *ROPE, LAYER_NORM),
    "stablelm": (*ALL, *ROPE, LAYER_NORM, ROTATED, PARALLEL),
    "lfm2": (*ALL, *ROPE, RMS, L_CACHE),
    "lfm2moe": (*ALL, *ROPE, RMS, L_CACHE, *EXPERTS, EXPERT_SIZES[0], LEADING_DENSE, ROUTING),
    # Without recurrent layers, a file of Granite 4 has sizes of these that llama.cpp does not read.
    "granite": (*ALL, *ROPE, RMS, *granite.KEYS, *SSM, EXPERT_SIZES[1]),
    "granitemoe": (*ALL, *ROPE, RMS, *granite.KEYS, *EXPERTS),
    GRANITE: (*ALL, *ROPE, RMS, *SSM, *EXPERTS, EXPERT_SIZES[1], *granite.KEYS),
    LATENT: (*ALL, RMS, *EXPERTS, *latent.KEYS),
    "bert": (*ALL, LAYER_NORM),
    **dict.fromkeys(("nomic-bert", "jina-bert-v3"), (*ALL, *ROPE, LAYER_NORM)),
    "modern-bert": (*ALL, *ROPE, LAYER_NORM, *WINDOWS[:3], HIDDEN_ACT),
    "gemma-embedding": (*ALL, *ROPE, RMS, *WINDOWS[:3]),
    GPT_OSS: (*ALL, *ROPE, RMS, *EXPERTS, EXPERT_SIZES[0], *WINDOWS[:3]),
    **{
        name: (*ALL, *ROPE, (LAYER_NORM if name in LAYER_NORMED else RMS), *keys)
        for name, keys in llamas.KEYS.items()
    },
    **dict.fromkeys(DELTAS, (*ALL, *ROPE, RMS, ROTATED, *SSM, RECURRENT_LAYERS, *DELTA_KEYS)),
}
# No value of these changes a number, in llama.cpp or here.
HARMLESS = {
    RMS,
    LAYER_NORM,  # each is read for some architectures only
    "vocab_size",
    "tensor_data_layout",
    "embedding_length_out",
    "pooling_type",
    "classifier.pooling_type",
    "expert_group_used_count",
    "rope.scaling.finetuned",
    "rope.scaling.alpha",
}


def architecture_of(settings: Settings) -> str:
    """Return the value of general.architecture. Raises ConfigError if it is not served."""
    kind, name = settings.get("general.type", "model"), settings.get("general.architecture")
    if name == "clip":
        raise ConfigError(
            "The GGUF file holds an image encoder (mmproj) and no model. Give the file of the "
            "model, which takes its image encoder from its folder."
        )
    if kind != "model":
        raise ConfigError(
            f"The GGUF file holds no model: its general.type is {kind!r:.99}. Give the file of the "
            "model."
        )
    if not isinstance(name, str) or name not in CLASSES:
        raise ConfigError(
            f"The GGUF architecture {name!r:.99} is not served; served are {', '.join(CLASSES)}."
        )
    return name


def own_settings(settings: Settings) -> dict[str, Any]:
    """Return the architecture's settings, without its name in front of the keys.

    All are checked, and arrays with a number for each layer become that number. Raises ConfigError
    for a setting that is missing, malformed, or would change numbers but is not computed.
    """
    name = architecture_of(settings)
    start = f"{name}."
    own = {key.removeprefix(start): v for key, v in settings.items() if key.startswith(start)}
    if name in MIXTURES and name in DELTAS:  # no layer has a plain network of this size
        own.setdefault("feed_forward_length", own.get(EXPERT_SIZES[0], 0))
    norm = LAYER_NORM if name in LAYER_NORMED else RMS
    needed = (*COUNTS, norm, *NEEDED.get(name, ()))
    may_have_experts = name in (GEMMA4, "llama") and bool(own.get(EXPERTS[0]))
    has_experts = name in WITH_EXPERTS or may_have_experts
    if has_experts and name == GEMMA4:
        needed += gemma4.NEEDED_OF_EXPERTS
    if has_experts and name == "llama":
        needed += EXPERTS
    if missing := [key for key in needed if key not in own]:
        raise ConfigError(f"The GGUF file lacks {start}{missing[0]}; convert the model again.")
    if name == GRANITE:
        granite.take_experts(own)
    recurrent = _take_recurrent(start, own) if name in HYBRIDS else []
    lists = gemma4.take_lists(own) if name == GEMMA4 else None
    for key in PER_LAYER:
        if isinstance(own.get(key), list):
            own[key] = _same_in_all_layers(start + key, own[key], own["block_count"])
    if name in (*DELTAS, LATENT):
        own["block_count"] -= _drafting_layers(start, own)
    original = "rope.scaling.original_context_length"
    experts = (*EXPERTS, *EXPERT_SIZES) if has_experts else ()
    sizes = (*experts, *(SSM if name in (*DELTAS, GRANITE) else ()))
    if name == LATENT:
        latent.check_routing(own)
        sizes += latent.SIZES
    for key in (*COUNTS, "attention.head_count_kv", *KEY_WIDTHS, original, *sizes):
        _check_number(start + key, own.get(key, 1), int, LIMITS.get(key, 2**31))
    for key in (norm, "rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor"):
        _check_number(start + key, own.get(key, 1), float, math.inf)
    own.setdefault("attention.head_count_kv", own["attention.head_count"])
    own.setdefault("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    _check_heads(start, own)
    if name in PARTLY_ROTATED:
        _check_rotated(start, own)
    _check_others(name, own)
    if name in HYBRIDS:
        own[RECURRENT] = recurrent or [False] * own["block_count"]
    if lists is not None:
        own[gemma4.LAYERS] = gemma4.layers_of(own, lists)
    return own


def notes_on(settings: Settings) -> list[str]:
    """Return what a user should know of settings that are ignored, or absent."""
    name = architecture_of(settings)
    computed = set(COMPUTED[name])
    if name == "exaone4" and settings.get("exaone4.block_count") != EXAONE_LAYERS:
        computed.discard("attention.sliding_window")
    absent = gemma4.notes_on(settings) if name == GEMMA4 else []
    unread = {f"{name}.{key}": values for key, values in UNREAD.items() if key not in computed}
    return absent + [
        f"{key} {settings[key]!r:.40} is ignored, as in llama.cpp"
        for key, values in unread.items()
        if key in settings and settings[key] not in values
    ]


def _take_recurrent(start: str, own: dict[str, Any]) -> list[bool]:
    """Return which layers are recurrent, and give those the key/value heads of the others."""
    heads = own.get(KV_HEADS)
    if not isinstance(heads, list):
        return []
    recurrent = [count == 0 for count in heads]
    if all(recurrent):
        raise ConfigError(
            f"The GGUF file has no key/value heads in any layer ({start}{KV_HEADS}). Penstock "
            "serves recurrent layers together with at least one attention layer."
        )
    of_others = next(count for count in heads if count != 0)
    own[KV_HEADS] = [count or of_others for count in heads]
    return recurrent


def _same_in_all_layers(key: str, values: list[Any], layers: Any) -> Any:
    if len(values) != layers:
        raise ConfigError(
            f"{key} has {len(values)} entries, for {layers!r:.40} layers (block_count), in the "
            "GGUF file; it needs one for each layer, or a single number."
        )
    if any(value != values[0] for value in values):
        raise ConfigError(
            f"The GGUF file has different numbers for its layers in {key}: {values!r:.99}. "
            "Penstock serves models with the same number in all layers only."
        )
    return values[0]


def _check_number(key: str, value: Any, kind: type[int] | type[float], limit: float) -> None:
    allowed = (int,) if kind is int else (int, float)
    if type(value) not in allowed or not 0 < value < limit:
        what = "a whole number" if kind is int else "a number"
        most = "" if limit == math.inf else f" and below {limit}"
        raise ConfigError(
            f"The GGUF file has {key} = {value!r:.99}; it must be {what} above 0{most}."
        )


def _drafting_layers(start: str, own: Settings) -> int:
    """Return how many of the last layers only draft tokens."""
    count, layers = own.get(DRAFTING, 0), own["block_count"]
    _check_number(f"{start}block_count", layers, int, LIMITS["block_count"])
    if type(count) is not int or not 0 <= count < layers:
        raise ConfigError(
            f"The GGUF file has {start}{DRAFTING} = {count!r:.99}; it must be a whole number from "
            f"0 on, and below its {layers} layers."
        )
    return count


def _check_heads(start: str, own: Settings) -> None:
    heads, shared = own["attention.head_count"], own["attention.head_count_kv"]
    width = own["attention.key_length"]
    if heads % shared:
        raise ConfigError(
            f"The GGUF file has {heads} heads ({start}attention.head_count), which is no multiple "
            f"of its {shared} key/value heads ({start}attention.head_count_kv)."
        )
    if start == "gpt2." and (shared != heads or width * heads != own["embedding_length"]):
        raise ConfigError(
            f"The GGUF file has {heads} heads of {width} dimensions and {shared} key/value heads, "
            f"for {start}embedding_length {own['embedding_length']}. GPT-2 needs as many key/value "
            "heads as heads, which divide that length."
        )
    if width % 2:
        raise ConfigError(
            f"The GGUF file has heads of {width} dimensions; the number must be even."
        )


def _check_rotated(start: str, own: Settings) -> None:
    width = own["attention.key_length"]
    rotated = own.get(ROTATED, width)
    if type(rotated) is not int or not 0 < rotated <= width or rotated % 2:
        raise ConfigError(
            f"The GGUF file has {start}{ROTATED} = {rotated!r:.99}; it must be an even number "
            f"above 0, and at most {width}, the width of a head."
        )


def _check_others(name: str, own: Settings) -> None:
    """Raise ConfigError for a setting that is neither computed nor without effect."""
    for key, value in own.items():
        width = own["attention.key_length"]
        if key.endswith("_swa") and key != SLIDING_WIDTH:
            width = own.get(SLIDING_WIDTH, width)
        served: tuple[Any, ...] = (width,) if key in WIDTHS else NEUTRAL.get(key, ())
        if key == CAUSAL and name in ENCODERS:
            served = (False,)
        is_unread = key in UNREAD and key not in READ.get(name, ())
        is_known = key in COMPUTED[name] or key in HARMLESS or is_unread
        without_rotary = name in ("gpt2", "bert") and key.startswith("rope.")
        if is_known or without_rotary or value in served:
            continue
        only = f" Served is {' or '.join(map(repr, served))}." if served else ""
        raise ConfigError(
            f"The GGUF file sets {name}.{key} to {value!r:.99}, which Penstock does not compute "
            f"for {name} models.{only} If the model does not need it, write a file without it: "
            f"gguf-new-metadata --remove-metadata {name}.{key} IN.gguf OUT.gguf (PyPI's gguf)."
        )
