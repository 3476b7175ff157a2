"""adapter_config.json of a LoRA adapter (arXiv 2106.09685) in PEFT's format.

A setting that changes the computation is applied or refused. A key that is unknown here is refused
if it is set, because a newer PEFT may give it a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.adapter.name_pattern import NamePattern
from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import full_path
from engine.errors import ConfigError

CONFIG = "adapter_config.json"
APPLIED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("bias", "fan_in_fan_out", "init_lora_weights"),
}
# Keys that describe training, or that the names of the tensors repeat.
WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
    "task_type",
}
# Initialisations that also change the base model's weights, which the adapter folder lacks.
MAX_PATTERNS = 4096  # PEFT writes at most one for each module
MAX_EXPRESSIONS = 16  # patterns that are no plain names; each may take 10 MiB
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of one adapter. A pattern applies to the modules whose names it ends."""

    folder: Path
    rank: int
    alpha: float
    is_rank_stabilised: bool  # arXiv 2312.03732
    rank_pattern: Mapping[NamePattern, int]
    alpha_pattern: Mapping[NamePattern, float]
    fan_in_fan_out: bool  # the base model stores these weights as [in, out]

    @classmethod
    def read(cls, path: str) -> AdapterConfig:
        """Read the config of an adapter folder. Raises ConfigError with the key at fault."""
        folder = full_path(Path(path))
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} has no {CONFIG}, so it is not a PEFT adapter folder.")
        config = read_json(folder / CONFIG)
        _refuse_unsupported(folder, config)
        return cls(
            folder,
            rank=_positive(folder, "r", config.get("r"), int),
            alpha=_positive(folder, "lora_alpha", config.get("lora_alpha"), float),
            is_rank_stabilised=bool(config.get("use_rslora")),
            rank_pattern=_pattern(folder, config, "rank_pattern", int),
            alpha_pattern=_pattern(folder, config, "alpha_pattern", float),
            fan_in_fan_out=bool(config.get("fan_in_fan_out")),
        )

    def rank_of(self, module: str) -> int:
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor on B A x of one module."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    where = folder / CONFIG
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{where} has peft_type = {kind!r}; only LORA is supported.")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{where} has bias = {config['bias']!r}; only none is supported.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ConfigError(
            f"{where} has init_lora_weights = {start!r}, which also changes the base model. Save "
            "the adapter with path_initial_model_for_weight_conversion, which makes it plain LoRA."
        )
    for key in sorted(config.keys() - APPLIED - WITHOUT_EFFECT):
        if config[key]:
            raise ConfigError(f"{where} has {key} = {config[key]!r:.80}, which is not supported.")


def _positive(folder: Path, key: str, value: Any, kind: type) -> Any:
    kinds = (int,) if kind is int else (int, float)
    if type(value) not in kinds or not 0 < value < 2**31:
        number = "whole number" if kind is int else "number"
        raise ConfigError(
            f"{folder / CONFIG} has {key} = {value!r:.40}; it must be a {number} above 0."
        )
    return kind(value)


def _pattern(folder: Path, config: dict[str, Any], key: str, kind: type) -> dict[NamePattern, Any]:
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{folder / CONFIG} has {key} = {given!r:.80}; it must be an object.")
    if len(given) > MAX_PATTERNS:
        raise ConfigError(
            f"{folder / CONFIG} has {len(given)} patterns in {key}; at most {MAX_PATTERNS} are "
            "read."
        )
    values = {}
    for text, value in given.items():
        try:
            pattern = NamePattern(text)
        except ValueError as error:
            raise ConfigError(
                f"{folder / CONFIG} has the pattern {text!r:.80} in {key}: {error}"
            ) from error
        values[pattern] = _positive(folder, f"{key}.{text:.80}", value, kind)
    count = sum(not pattern.is_plain for pattern in values)
    if count > MAX_EXPRESSIONS:
        raise ConfigError(
            f"{folder / CONFIG} has {count} regular expressions in {key}; at most "
            f"{MAX_EXPRESSIONS} are read. Write them as plain names of modules."
        )
    return values


def _matching(patterns: Mapping[NamePattern, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name."""
    for pattern, value in patterns.items():
        if pattern.matches(module):
            return value
    return default
