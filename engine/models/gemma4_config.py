"""The config of Gemma 4, in the spelling of published checkpoints and in that of transformers 5.24.

The latter replaces `global_head_dim` and `num_global_key_value_heads` by `per_layer_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.layers.experts import ExpertsShape
from engine.layers.rotary import RopeScaling, rope_theta
from engine.models.base import (
    attention_heads,
    expect,
    layer_count,
    layer_windows,
    nullable,
    positive,
    positive_float,
)
from engine.models.llama import LlamaConfig
from engine.models.vision.gemma4 import Gemma4VisionConfig

# The defaults of transformers: a nested text_config may omit values that equal them.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
}
GLOBAL_HEAD_DIM, PER_LAYER_SIZE, PERIOD = 512, 256, 6
KINDS = ("sliding_attention", "full_attention")
ROPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
HEADS = ("head_dim", "num_key_value_heads")  # what per_layer_config may override


class KVHeads(NamedTuple):
    """The keys, and the values, that a layer has for each token."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(LlamaConfig):
    """The config of a Gemma 4 checkpoint.

    `kv_heads`, `head_dim` and the local_ fields are those of sliding layers. `rope_theta`,
    `rope_scaling` and the global_ fields are those of the other layers.
    """

    global_kv_heads: int
    global_head_dim: int
    global_keys_are_values: bool
    local_theta: float
    local_scaling: RopeScaling
    reads: tuple[int | None, ...]  # of each layer: the layer whose KV it reads, if not its own
    reader_width: int  # of the MLP in layers that read
    per_layer: int  # the size of the inputs that each layer has for a token; 0: none
    vocab_size_per_layer: int
    final_softcap: float | None
    nested: bool  # inside a multimodal checkpoint
    pad_token: int  # that the inputs per layer have in the places of images
    vision: Gemma4VisionConfig | None  # None: text only

    def kv_shape(self, index: int) -> KVHeads:
        if self.windows[index] is None:
            return KVHeads(self.global_kv_heads, self.global_head_dim)
        return KVHeads(self.kv_heads, self.head_dim)

    def keys_are_values(self, index: int) -> bool:
        return self.global_keys_are_values and self.windows[index] is None

    def width(self, index: int) -> int:
        """Return the width of the MLP of layer `index`."""
        return self.intermediate if self.reads[index] is None else self.reader_width


def read_gemma4(config: dict[str, Any]) -> Gemma4Config:
    """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
    nested = "text_config" in config
    text = _text_config(config) if nested else {"tie_word_embeddings": True} | config
    expect(text, "use_bidirectional_attention", None, "vision")
    text |= {"hidden_act": text.get("hidden_activation", "gelu_pytorch_tanh"), "mlp_bias": False}
    layers = layer_count(text)
    kinds = _layer_kinds(text, layers)
    windows = layer_windows(
        text | {"layer_types": kinds}, nullable(text, "sliding_window", positive), lambda i: False
    )
    sliding, whole = _kv_heads(text, kinds)
    reads = _reads(text, kinds)
    is_wide = bool(text.get("use_double_wide_mlp", False))
    local = _rope(text, "sliding_attention")
    everywhere = _rope(text, "full_attention")
    per_layer = _per_layer_size(text)
    vision = None
    if nested and config.get("vision_config") is not None:
        vision = Gemma4VisionConfig.from_hf(config, positive(text, "hidden_size"))
    sees_whole = text.get("use_bidirectional_attention") == "vision"
    return Gemma4Config.from_hf(
        text | everywhere | {"head_dim": sliding.dim, "num_key_value_heads": sliding.heads},
        embed_scale=positive(text, "hidden_size") ** 0.5,
        windows=windows,
        global_kv_heads=whole.heads,
        global_head_dim=whole.dim,
        global_keys_are_values=bool(text.get("attention_k_eq_v", False)),
        rope_theta=rope_theta(everywhere),
        rope_scaling=RopeScaling.from_hf(everywhere),
        local_theta=rope_theta(local),
        local_scaling=RopeScaling.from_hf(local),
        reads=reads,
        reader_width=positive(text, "intermediate_size") * (2 if is_wide else 1),
        per_layer=per_layer,
        vocab_size_per_layer=_per_layer_vocabulary(text) if per_layer else 0,
        experts=_experts(text),
        final_softcap=nullable(
            {"final_logit_softcapping": None} | text, "final_logit_softcapping", positive_float
        ),
        nested=nested,
        pad_token=_pad_token(text),
        vision=vision,
        sees_whole_images=vision is not None and sees_whole,
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config["text_config"]
    if not isinstance(text, dict):
        raise ConfigError(f"config.json has text_config = {text!r}; it must be an object.")
    tied = config.get("tie_word_embeddings", True)
    expect(text, "tie_word_embeddings", tied)
    return TEXT_DEFAULTS | text | {"tie_word_embeddings": tied}


def _layer_kinds(text: dict[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer. As in transformers, the last one sees all keys."""
    given = text.get("layer_types")
    if given is None:
        given = [KINDS[(index + 1) % PERIOD == 0] for index in range(layers)]
    if not isinstance(given, list):
        raise ConfigError(f"config.json has layer_types = {given!r}; it must be a list.")
    return [*given[:-1], "full_attention"]


def _kv_heads(text: dict[str, Any], kinds: list[str]) -> tuple[KVHeads, KVHeads]:
    """Return the KV heads of sliding and of global layers.

    Raises ConfigError if layers of one kind differ.
    """
    _, count, dim = attention_heads(text)
    of_kinds = {kind: text | {"num_key_value_heads": count, "head_dim": dim} for kind in KINDS}
    if "per_layer_config" not in text:
        own_dim = positive(text, "global_head_dim", GLOBAL_HEAD_DIM)
        of_kinds["full_attention"]["head_dim"] = own_dim
        own_count = text.get("num_global_key_value_heads")
        if text.get("attention_k_eq_v", False) and own_count is not None:
            of_kinds["full_attention"]["num_key_value_heads"] = own_count
    else:
        changes = text["per_layer_config"] or {}
        for kind in set(kinds):
            of_kinds[kind] |= _changes_of(changes, [i for i, k in enumerate(kinds) if k == kind])
    found = {kind: attention_heads(values) for kind, values in of_kinds.items()}
    sliding, whole = (KVHeads(*found[kind][1:]) for kind in KINDS)
    return sliding, whole


def _changes_of(changes: Any, layers: list[int]) -> dict[str, Any]:
    """Return what `per_layer_config` overrides in each of these layers, which have one kind."""
    if not isinstance(changes, dict) or not all(isinstance(v, dict) for v in changes.values()):
        raise ConfigError(f"config.json has per_layer_config = {changes!r}; it must be an object.")
    by_layer: dict[int, dict[str, Any]] = {}
    for layer, values in changes.items():
        if not str(layer).isdecimal():
            raise ConfigError(
                f"config.json has per_layer_config of {layer!r}, which is no number of a layer."
            )
        if further := sorted(values.keys() - set(HEADS)):
            raise ConfigError(
                f"config.json has per_layer_config with {further[0]}; supported: "
                f"{' and '.join(HEADS)}."
            )
        by_layer[int(layer)] = values  # transformers writes "04", if there are ten layers or more
    found = [by_layer.get(layer, {}) for layer in layers]
    if any(values != found[0] for values in found):
        raise ConfigError(
            "config.json has a per_layer_config in which layers of one kind differ; supported: "
            "one for all sliding and one for all global layers."
        )
    return dict(found[0])


def _reads(text: dict[str, Any], kinds: list[str]) -> tuple[int | None, ...]:
    """Return the layer whose KV each layer reads: None for its own.

    The last `num_kv_shared_layers` read that of the last layer of their kind before them.
    """
    key = "num_kv_shared_layers"
    shared, layers = text.get(key, 0), len(kinds)
    if type(shared) is not int or not 0 <= shared < layers:
        raise ConfigError(
            f"config.json has {key} = {shared!r}; it must be a whole number from 0 to {layers - 1}."
        )
    own = kinds[: layers - shared]
    if missing := sorted(set(kinds) - set(own)):
        raise ConfigError(
            f"config.json has {key} = {shared}, but no {missing[0]} layer before these layers."
        )
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(own)}
    return tuple([None] * len(own) + [last[kind] for kind in kinds[len(own) :]])


def _rope(text: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a config with the rotary parameters of one kind of layers."""
    given = text.get("rope_parameters") or ROPE
    if not isinstance(given, dict) or not isinstance(given.get(kind), dict):
        raise ConfigError(
            f"config.json has rope_parameters = {given!r}; supported: an object with parameters "
            f"for {' and '.join(KINDS)} each."
        )
    longest = text.get("max_position_embeddings")
    return {"rope_parameters": given[kind], "max_position_embeddings": longest}


def _per_layer_size(text: dict[str, Any]) -> int:
    size = text.get("hidden_size_per_layer_input", PER_LAYER_SIZE)
    return positive(text, "hidden_size_per_layer_input", PER_LAYER_SIZE) if size else 0


def _per_layer_vocabulary(text: dict[str, Any]) -> int:
    """Return the rows of the second embedding. The reference fails for tokens without a row."""
    key, vocab_size = "vocab_size_per_layer_input", positive(text, "vocab_size")
    rows = positive(text, key, TEXT_DEFAULTS["vocab_size"])
    if rows < vocab_size:
        raise ConfigError(
            f"config.json has {key} = {rows}; it must be at least vocab_size, {vocab_size}."
        )
    return rows


def _pad_token(text: dict[str, Any]) -> int:
    key, vocab_size = "pad_token_id", positive(text, "vocab_size")
    token = text.get(key) or 0
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(f"config.json has {key} = {token!r}; it must be below {vocab_size}.")
    return token


def _experts(text: dict[str, Any]) -> ExpertsShape | None:
    if not text.get("enable_moe_block", False):
        return None
    count, chosen = positive(text, "num_experts"), positive(text, "top_k_experts")
    if chosen > count:
        raise ConfigError(f"config.json has top_k_experts {chosen}, but only {count} experts.")
    return ExpertsShape(count, chosen, positive(text, "moe_intermediate_size"), renormalises=True)
