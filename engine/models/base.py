"""The Model protocol: what the runner asks of every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from engine.attention.batch import ForwardBatch
from engine.errors import ConfigError
from engine.weights.rules import WeightMap

Number = TypeVar("Number", int, float)


class Facts(Protocol):
    """What the runner asks of an architecture's own config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None:
        """The longest context the model was made for; None where positions have no end."""


class Model(Protocol):
    """A model over ragged tokens. Built on the meta device from a Hugging Face config.

    Every implementation is an nn.Module with `__init__(config, *, max_positions, dtype)`, where
    `max_positions` is how many positions will be served. A decoder has `forward` and `logits`, an
    encoder `encode`, an encoder–decoder all three; the registry says which it is.
    """

    config: Facts

    @staticmethod
    def read_config(config: dict[str, Any]) -> Facts:
        """The frozen facts of a config.json; ConfigError where they are not what is served."""

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden] of whole texts; writes the KV of cross layers."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden] of all tokens, after the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden] -> [L, vocab_size] in fp32, or on a CPU in the weights' dtype."""

    def weight_map(self) -> WeightMap: ...


def required(config: dict[str, Any], key: str) -> Any:
    """config[key], or a ConfigError naming the key."""
    if config.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}, which this architecture needs.")
    return config[key]


def positive(
    config: dict[str, Any], key: str, default: int | None = None, *, below: int = 2**31
) -> int:
    """config[key], else the default, else a ConfigError; also where it is no count from one to
    `below`, which no tensor could have."""
    value = config.get(key)
    if value is None:
        value = required(config, key) if default is None else default
    if type(value) is not int or not 0 < value < below:
        raise ConfigError(
            f"config.json has {key} = {value!r}; it must be a whole number above 0 and below "
            f"{below}."
        )
    return value


def layer_count(
    config: dict[str, Any], key: str = "num_hidden_layers", default: int | None = None
) -> int:
    """As `positive`, of what is laid out one by one: thousands take seconds."""
    return positive(config, key, default, below=10_000)


def positive_float(config: dict[str, Any], key: str) -> float:
    """config[key] as a number above zero, else a ConfigError."""
    value = required(config, key)
    if type(value) not in (int, float) or not value > 0:
        raise ConfigError(f"config.json has {key} = {value!r}; it must be a number above 0.")
    return float(value)


def shared_by(config: dict[str, Any], key: str, heads_key: str) -> tuple[int, int]:
    """(config[key], a number of heads); ConfigError where the heads cannot share it evenly."""
    size, heads = positive(config, key), positive(config, heads_key)
    if size % heads:
        raise ConfigError(f"config.json has {key} {size}, which {heads} heads cannot share.")
    return size, heads


def attention_heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """(query heads, key/value heads, head_dim); ConfigError where they cannot go together."""
    heads = positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    one_each = max(positive(config, "hidden_size") // heads, 1)
    head_dim = positive(config, "head_dim", one_each, below=2**16)  # by positions, tables
    if heads % kv_heads:
        raise ConfigError(
            f"config.json has {heads} attention heads and {kv_heads} key/value heads; each of "
            "these must serve equally many of those."
        )
    if head_dim % 2:
        raise ConfigError(f"config.json has head_dim = {head_dim}; rotary needs an even one.")
    return heads, kv_heads, head_dim


def nullable(
    config: dict[str, Any], key: str, read: Callable[[dict[str, Any], str], Number]
) -> Number | None:
    """read(config, key), or None where the config says null; ConfigError where it says nothing."""
    if key not in config:
        raise ConfigError(f"config.json lacks {key!r}; null means none.")
    return None if config[key] is None else read(config, key)


def layer_windows(
    config: dict[str, Any], window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """For each layer its window, None where it sees everything.

    Which layers slide is said by `layer_types`, in older configs by the rule `slides(index)`.
    """
    layers = layer_count(config)
    kinds = ("full_attention", "sliding_attention")
    given = config.get("layer_types")
    types = [kinds[slides(i)] for i in range(layers)] if given is None else given
    if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
        raise ConfigError(
            f"config.json has layer_types = {given!r}; it must say {' or '.join(kinds)} for each "
            f"of {layers} layers."
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError("config.json has layers of sliding_attention without a sliding_window.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def expect(config: dict[str, Any], key: str, *allowed: Any) -> None:
    """ConfigError where a config asks for a variant this model file does not compute."""
    if key in config and config[key] not in allowed:
        raise ConfigError(
            f"config.json has {key} = {config[key]!r}; this architecture is served with "
            f"{' or '.join(repr(a) for a in allowed)} only."
        )
