"""Qwen3.5, dense: Qwen3-Next with other input projections and a plain MLP.

Multimodal checkpoints are served as the language model that they contain. Their rotary embedding
has three positions a token, for time, height and width. In a text all three are equal, so it is the
plain one, and `mrope_section` changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from engine.checkpoint.weight_map import Names, WeightMap
from engine.errors import ConfigError
from engine.models.qwen3_next import DELTA, GATED_NAMES, GatedLlama, Qwen3NextConfig

STACKED = dict.fromkeys("qkv", DELTA + "in_proj_qkv")
PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, which may be inside a multimodal one.

    The embedding is tied if either of the two says so: transformers saves that at the top only.
    """
    if "text_config" not in config:
        return config
    text = config["text_config"]
    if not isinstance(text, dict):
        raise ConfigError(f"config.json has text_config = {text!r}; it must be an object.")
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return text | {"tie_word_embeddings": tied}


class Qwen35(GatedLlama):
    names: ClassVar[Names] = GATED_NAMES | {
        "blocks.{i}.recurrent.inputs": STACKED | {"z": DELTA + "in_proj_z"},
        "blocks.{i}.recurrent.rates": DELTA + "in_proj_{part}",
    }
    ignored_prefixes: ClassVar[Sequence[str]] = ("mtp.", "model.visual.", "visual.", "model.mtp.")

    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen3NextConfig:
        return Qwen3NextConfig.from_hf(text_config(config))

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. A language model keeps the prefix that it had in a larger one."""
        plain = super().weight_map()
        return replace(
            plain,
            targets={name.removeprefix("model."): each for name, each in plain.targets.items()},
            prefixes=PREFIXES,
            aliases={name.removeprefix("model."): each for name, each in plain.aliases.items()},
        )
