"""Gated delta nets in GGUF files: Qwen3-Next and Qwen3.5, both in the form of Qwen3.5.

llama.cpp's converter stores -exp(A_log) and weights of norms with 1 added, except those of the
gated norm. It takes Qwen3-Next's projections apart, but for `ssm_ba`. In files of Qwen3.5, value
heads are tiled: the first one of each key head, then the second one of each, and so on.
"""

from __future__ import annotations

from typing import TypeVar

from engine.checkpoint.gguf.settings import DELTAS, DRAFTING, RECURRENT_LAYERS, Settings
from engine.errors import ConfigError

Shape = tuple[int, ...]
Tensor = TypeVar("Tensor")
INTERVAL, PERIOD = "full_attention_interval", 4  # the second is llama.cpp's default
# Parts of a block whose names do not end in "weight".
ENDINGS = {"ssm_a": "ssm_a", "ssm_dt": "ssm_dt.bias"}
RATES = "ssm_ba"  # Qwen3-Next's: for each key head the strengths of its heads, then their decays
RATE_NAMES = ("ssm_beta", "ssm_alpha")  # Qwen3.5's
NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
WHOLE_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}


def recurrent_layers(name: str, own: Settings) -> list[bool]:
    """Return which layers have a gated delta net. Raises ConfigError if a setting is malformed."""
    layers = own["block_count"]
    if name not in DELTAS:
        return [False] * layers
    given = own.get(RECURRENT_LAYERS)
    if given is None:
        period = own.get(INTERVAL, PERIOD)
        if type(period) is not int or period < 1:
            raise ConfigError(
                f"The GGUF file has {name}.{INTERVAL} = {period!r:.99}; it must be a whole number "
                "above 0."
            )
        return [(layer + 1) % period != 0 for layer in range(layers)]
    served = given[:layers] if isinstance(given, list) else []
    if len(served) != layers or len(given) > layers + own.get(DRAFTING, 0):
        raise ConfigError(
            f"The GGUF file has {name}.{RECURRENT_LAYERS} = {given!r:.99}; it must be a list with "
            f"an entry for each of {layers} layers."
        )
    return [bool(each) for each in served]


def without_drafter(tensors: dict[str, Tensor], own: Settings) -> dict[str, Tensor]:
    """Return the tensors without those of layers that only draft tokens."""
    first = own["block_count"]
    drafting = tuple(f"blk.{first + number}." for number in range(own.get(DRAFTING, 0)))
    return {name: each for name, each in tensors.items() if not name.startswith(drafting)}


def head_sizes(own: Settings) -> tuple[int, int]:
    """Return the dimensions of a key and of a value head. Raises ConfigError if they do not fit."""
    inner, values = own["ssm.inner_size"], own["ssm.time_step_rank"]
    if inner % values or values % own["ssm.group_count"]:
        raise ConfigError(
            f"The GGUF file has ssm.inner_size {inner} and ssm.time_step_rank {values} for "
            f"ssm.group_count {own['ssm.group_count']}; each must be a multiple of the next one."
        )
    return own["ssm.state_size"], inner // values


def delta_parts(name: str, own: Settings) -> dict[str, Shape]:
    """Return the parts of a gated delta net with their shapes."""
    hidden, inner = own["embedding_length"], own["ssm.inner_size"]
    key_dim, value_dim = head_sizes(own)
    heads = own["ssm.time_step_rank"]
    channels = 2 * own["ssm.group_count"] * key_dim + inner
    parts: dict[str, Shape] = {
        "attn_qkv": (channels, hidden),
        "attn_gate": (inner, hidden),
        "ssm_conv1d": (channels, own["ssm.conv_kernel"]),
        "ssm_a": (heads,),
        "ssm_dt": (heads,),
        "ssm_norm": (value_dim,),
        "ssm_out": (hidden, inner),
    }
    if name == "qwen3next":
        return parts | {RATES: (2 * heads, hidden)}
    return parts | dict.fromkeys(RATE_NAMES, (heads, hidden))
