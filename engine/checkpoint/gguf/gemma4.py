"""Gemma 4 in GGUF files: sliding and global layers differ in the shapes of their heads.

llama.cpp's converter writes the rotary embedding of global layers as factors of the frequencies:
1 for pairs of dimensions that are rotated, and 1e30 for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from engine.checkpoint.gguf.fused import GATE_UP
from engine.errors import ConfigError

Settings = Mapping[str, Any]
Shape = tuple[int, ...]
GEMMA4 = "gemma4"
KV_HEADS, INNER = "attention.head_count_kv", "feed_forward_length"
WIDTH, SLIDING_WIDTH = "attention.key_length", "attention.key_length_swa"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
READERS, PER_LAYER_SIZE = "attention.shared_kv_layers", "embedding_length_per_layer_input"
CAP, DEFAULT_CAP = "final_logit_softcapping", 30.0  # llama.cpp's default; 0 is none
EXPERT_COUNT, EXPERT_INNER = "expert_count", "expert_feed_forward_length"
ROTATED = ("rope.dimension_count", "rope.dimension_count_swa")
NEEDED = (WIDTH, SLIDING_WIDTH, ROTATED[1], WINDOW, PATTERN, PER_LAYER_SIZE)
NEEDED_OF_EXPERTS = ("expert_used_count", EXPERT_INNER)
KEYS = (SLIDING_WIDTH, READERS, PER_LAYER_SIZE, EXPERT_COUNT, *NEEDED_OF_EXPERTS)
LAYERS = "layers"  # `own_settings` adds a list of Layer under this key
STILL = 1e20  # a pair whose frequency is divided by more than this is not rotated
NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": "experts.{e}.gate_proj",
    "ffn_up_exps": "experts.{e}.up_proj",
    "ffn_down_exps": "experts.{e}.down_proj",
}
WHOLE_NAMES = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


class Layer(NamedTuple):
    slides: bool
    reads: bool  # the keys and values of an earlier layer
    kv_heads: int
    width: int  # of a head
    inner: int  # of the MLP


class Lists(NamedTuple):
    """Settings with a number for each layer, or with one for all."""

    kv_heads: Any
    inner: Any


def take_lists(own: dict[str, Any]) -> Lists:
    """Return what the file says of layers, and leave the number of the first one in `own`."""
    found = Lists(own.get(KV_HEADS, own.get("attention.head_count")), own.get(INNER))
    for key in (KV_HEADS, INNER):
        if isinstance(own.get(key), list) and own[key]:
            own[key] = own[key][0]
    return found


def layers_of(own: Settings, lists: Lists) -> list[Layer]:
    """Return the layers. `own` are checked settings. Raises ConfigError if `lists` do not fit."""
    count = own["block_count"]
    slides = own[PATTERN]
    if not isinstance(slides, list) or len(slides) != count or slides[-1]:
        raise ConfigError(
            f"The GGUF file has {GEMMA4}.{PATTERN} = {slides!r:.99}; it must be a list with an "
            f"entry for each of {count} layers, and the last one must be False."
        )
    _check_whole(WINDOW, own[WINDOW], 1)
    _check_whole(PER_LAYER_SIZE, own[PER_LAYER_SIZE], 0)
    if own[SLIDING_WIDTH] % 2:
        raise ConfigError(
            f"The GGUF file has sliding layers with heads of {own[SLIDING_WIDTH]} dimensions; the "
            "number must be even."
        )
    readers = own.get(READERS, 0)
    _check_whole(READERS, readers, 0)
    if readers >= count:
        raise ConfigError(
            f"The GGUF file has {GEMMA4}.{READERS} = {readers}; it must be below {count}, the "
            "number of layers."
        )
    kv_heads = _of_layers(KV_HEADS, lists.kv_heads, count)
    inner = _of_layers(INNER, lists.inner, count)
    layers = []
    for index in range(count):
        width = own[SLIDING_WIDTH if slides[index] else WIDTH]
        reads = index >= count - readers
        layers.append(Layer(bool(slides[index]), reads, kv_heads[index], width, inner[index]))
        if own["attention.head_count"] % kv_heads[index]:
            raise ConfigError(
                f"The GGUF file has {own['attention.head_count']} heads, which is no multiple of "
                f"{kv_heads[index]} in {GEMMA4}.{KV_HEADS}."
            )
    if len({(layer.slides, layer.kv_heads) for layer in layers}) > len(set(map(bool, slides))):
        _refuse(KV_HEADS, lists.kv_heads, "a number for all sliding and one for all other layers")
    if {layer.inner for layer in layers if not layer.reads} != {inner[0]} or (
        {layer.inner for layer in layers if layer.reads} not in (set(), {inner[0]}, {2 * inner[0]})
    ):
        served = "a number for all layers, or twice that for the last ones, which share KV"
        _refuse(INNER, lists.inner, served)
    return layers


def _of_layers(key: str, given: Any, count: int) -> list[int]:
    numbers = given if isinstance(given, list) else [given] * count
    if len(numbers) != count:
        raise ConfigError(
            f"{GEMMA4}.{key} has {len(numbers)} entries, for {count} layers (block_count), in the "
            "GGUF file; it needs one for each layer, or a single number."
        )
    for number in numbers:
        _check_whole(key, number, 1)
    return numbers


def _check_whole(key: str, value: Any, least: int) -> None:
    if type(value) is not int or not least <= value < 2**31:
        raise ConfigError(
            f"The GGUF file has {GEMMA4}.{key} = {value!r:.99}; it must be a whole number from "
            f"{least} on."
        )


def _refuse(key: str, value: Any, served: str) -> None:
    raise ConfigError(
        f"The GGUF file has {GEMMA4}.{key} = {value!r:.99}. Penstock serves models with {served}."
    )


def notes_on(settings: Settings) -> list[str]:
    """Return what a user should know of settings that are absent."""
    if f"{GEMMA4}.{CAP}" in settings:
        return []
    return [
        f"the file has no {GEMMA4}.{CAP}: as in llama.cpp, logits are capped at {DEFAULT_CAP:g}; "
        "a model without a cap needs it with 0"
    ]


def gemma4_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the keys that only this architecture has, without those that tensors decide."""
    layers: list[Layer] = own[LAYERS]
    kinds = ("full_attention", "sliding_attention")
    config = {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": own[SLIDING_WIDTH],
        "num_key_value_heads": next((each.kv_heads for each in layers if each.slides), 1),
        "layer_types": [kinds[layer.slides] for layer in layers],
        "per_layer_config": {
            str(index): {"head_dim": layer.width, "num_key_value_heads": layer.kv_heads}
            for index, layer in enumerate(layers)
            if not layer.slides
        },
        "sliding_window": own[WINDOW],
        "num_kv_shared_layers": own.get(READERS, 0),
        "use_double_wide_mlp": layers[-1].inner != layers[0].inner,
        "hidden_size_per_layer_input": own[PER_LAYER_SIZE],
        "final_logit_softcapping": own.get(CAP, DEFAULT_CAP) or None,
    }
    if not own.get(EXPERT_COUNT):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": own[EXPERT_COUNT],
        "top_k_experts": own["expert_used_count"],
        "moe_intermediate_size": own[EXPERT_INNER],
    }


def tensors_config(own: Settings, vocab_size: int, tensors: Collection[str]) -> dict[str, Any]:
    """Return the keys that tensors decide. Raises ConfigError if layers of one kind differ."""
    owners = [i for i, layer in enumerate(own[LAYERS]) if not layer.slides and not layer.reads]
    names = [f"blk.{index}.attn_v.weight" for index in owners]
    missing = [name for name in names if name not in tensors]
    if missing and len(missing) < len(names):
        raise ConfigError(
            f"The GGUF file lacks the tensor {missing[0]}, which it has for other blocks. Penstock "
            "serves models whose blocks of one kind are equal."
        )
    return {"attention_k_eq_v": bool(missing), "vocab_size_per_layer_input": vocab_size}


def proportional(factors: Sequence[float], factor: float) -> dict[str, Any] | None:
    """Return the scaling with these factors [head_dim / 2]; None if it is another one."""
    if not factors:
        return None
    turning = [each for each in factors if each <= STILL]
    if any(each != 1 for each in turning) or any(f > STILL for f in factors[: len(turning)]):
        return None
    share = len(turning) / len(factors)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}


def gemma4_shapes(own: Settings, vocab_size: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes of tensors that must be there, and of those that may."""
    hidden, size = own["embedding_length"], own[PER_LAYER_SIZE]
    layers: list[Layer] = own[LAYERS]
    required: dict[str, Shape] = {
        "token_embd.weight": (vocab_size, hidden),
        "output_norm.weight": (hidden,),
        "rope_freqs.weight": (own[WIDTH] // 2,),
    }
    optional: dict[str, Shape] = {"output.weight": (vocab_size, hidden)}
    if size:
        required |= {
            "per_layer_token_embd.weight": (vocab_size, len(layers) * size),
            "per_layer_model_proj.weight": (len(layers) * size, hidden),
            "per_layer_proj_norm.weight": (size,),
        }
    for index, layer in enumerate(layers):
        parts, may = _attention(own, layer), {}
        if layer.reads:  # published checkpoints have them, but no program reads them
            may = {part: parts.pop(part) for part in ("attn_k", "attn_v", "attn_k_norm")}
        elif not layer.slides:  # the keys are values
            may["attn_v"] = parts.pop("attn_v")
        parts |= {
            "ffn_gate": (layer.inner, hidden),
            "ffn_up": (layer.inner, hidden),
            "ffn_down": (hidden, layer.inner),
            **dict.fromkeys(
                ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (hidden,)
            ),
            "layer_output_scale": (1,),
        }
        if size:
            parts |= {"inp_gate": (size, hidden), "proj": (hidden, size), "post_norm": (hidden,)}
        required |= {f"blk.{index}.{part}.weight": shape for part, shape in parts.items()}
        optional |= {f"blk.{index}.{part}.weight": shape for part, shape in may.items()}
        if own.get(EXPERT_COUNT):
            required |= {f"blk.{index}.{part}": shape for part, shape in _experts(own).items()}
    return required, optional


def _attention(own: Settings, layer: Layer) -> dict[str, Shape]:
    hidden, queries = own["embedding_length"], own["attention.head_count"] * layer.width
    keys = layer.kv_heads * layer.width
    return {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (layer.width,),
        "attn_k_norm": (layer.width,),
    }


def _experts(own: Settings) -> dict[str, Shape]:
    hidden, count, inner = own["embedding_length"], own[EXPERT_COUNT], own[EXPERT_INNER]
    norms = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    return {
        "ffn_gate_inp.weight": (count, hidden),
        "ffn_gate_inp.scale": (hidden,),
        f"{GATE_UP}.weight": (count, 2 * inner, hidden),
        "ffn_down_exps.weight": (count, hidden, inner),
        "ffn_down_exps.scale": (count,),
        **{f"{norm}.weight": (hidden,) for norm in norms},
    }
