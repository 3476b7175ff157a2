"""The language model inside a multimodal checkpoint: its settings, and names of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.checkpoint.weight_map import Target, WeightMap
from engine.errors import ConfigError
from engine.layers.rotary import rope_parameters
from engine.models.base import required

VISION = ("vision_tower.", "multi_modal_projector.")
# Old checkpoints have the first and the third one, new ones the second and the last.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "")
TEXT, TOWER = "language_model.", "vision_tower."
# The defaults of transformers' Llama: a nested text_config omits values that equal them.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def nested_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `text_config`. Raises ConfigError if it is missing or not an object."""
    text = required(config, "text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json has text_config = {text!r}; it must be an object.")
    return text


def without_mrope(text: dict[str, Any]) -> dict[str, Any]:
    """Return a text model's config with "default" in place of the rotary type "mrope".

    Both have the same frequencies. Raises ConfigError as `rope_parameters`.
    """
    parameters = rope_parameters(text)
    if parameters.get("rope_type", parameters.get("type")) == "mrope":
        parameters = parameters | {"rope_type": "default"}
    return text | {"rope_parameters": parameters, "rope_scaling": None}


def expect_width(given: int, hidden: int) -> None:
    """Raise ConfigError unless a tower's embeddings are as wide as those of the language model."""
    if given != hidden:
        raise ConfigError(
            f"config.json has out_hidden_size {given} in vision_config; the language model has "
            f"hidden_size {hidden}."
        )


def names_inside(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return `names` with `prefix` in place of "model." in the checkpoint's names."""
    found = {}
    for ours, theirs in names.items():
        inner = theirs.removeprefix("model.")
        found[ours] = theirs if inner == theirs else prefix + inner
    return found


def spellings(targets: Mapping[str, Target], *, tied: bool) -> dict[str, tuple[str, ...]]:
    """Return the aliases of all tensors of a model with `language_model` and `vision_tower`.

    A tied head may also be stored.
    """
    aliases = {name: tuple(other_spellings(name)) for name in targets}
    if tied:
        embedding, head = TEXT + "model.embed_tokens.weight", TEXT + "lm_head.weight"
        aliases[embedding] += (head, *other_spellings(head))
    return aliases


def other_spellings(name: str) -> Iterator[str]:
    """Yield the names that published checkpoints, and transformers in memory, have for a tensor."""
    if name.startswith(TEXT + "model."):
        inner = name.removeprefix(TEXT + "model.")
        yield "model." + TEXT + inner
        yield TEXT + inner
    elif name.startswith(TEXT):
        yield name.removeprefix(TEXT)
    else:
        yield "model." + name
    if name.startswith(TOWER):
        inner = name.removeprefix(TOWER)
        yield TOWER + "vision_model." + inner
        yield "model." + TOWER + "vision_model." + inner


def nested_weight_map(
    targets: Mapping[str, Target], aliases: Mapping[str, Sequence[str]]
) -> WeightMap:
    """Return the map of a nested model, from the names of the tensors without its prefix."""
    ignored = [prefix + part for prefix in ("", "model.") for part in VISION]
    return WeightMap(dict(targets), prefixes=PREFIXES, aliases=aliases, ignored_prefixes=ignored)
