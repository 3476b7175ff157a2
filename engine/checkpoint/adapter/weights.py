"""The tensors of a LoRA adapter in PEFT's format: two low-rank matrices for each adapted module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from engine.checkpoint.adapter.config import CONFIG, AdapterConfig
from engine.checkpoint.stored import FLOATS, StoredTensor, stored_tensors
from engine.errors import ConfigError

WEIGHTS = "adapter_model.safetensors"
LONGEST_NAME = 512  # characters
MAX_MATCHES = 1 << 22  # names of modules times patterns
NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


class LowRank(NamedTuple):
    """The change b a of a module's weight [out, in]."""

    a: torch.Tensor  # [rank, in] fp32
    b: torch.Tensor  # [out, rank] fp32, times the adapter's scale


@dataclass(frozen=True, slots=True)
class StoredLowRank:
    """The two matrices of one module, without their numbers."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [out, in] of the module's weight."""
        return self.b.shape[0], self.a.shape[1]

    def read(self) -> LowRank:
        """Return the numbers. Raises ConfigError if one is NaN or infinite."""
        return LowRank(_finite(self.a), _finite(self.b).mul_(self.scale))


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter folder whose config and tensor headers have been checked."""

    config: AdapterConfig
    modules: dict[str, StoredLowRank]  # by the module's name in the checkpoint of the base model
    stamp: tuple[tuple[int, int], ...]  # time and size of each file; differs once one is replaced

    @classmethod
    def open(cls, path: str) -> StoredAdapter:
        """Read the headers of the adapter folder `path`. Raises ConfigError if it is no LoRA."""
        config = AdapterConfig.read(path)
        file = config.folder / WEIGHTS
        if not file.is_file():
            raise ConfigError(
                f"{config.folder} has no {WEIGHTS}; adapters in other formats are not supported."
            )
        stamp = _stamps(config.folder)
        return cls(config, _modules(config, file), stamp)

    @property
    def is_current(self) -> bool:
        """Whether the files have not been replaced since then. Raises OSError if they are gone."""
        return self.stamp == _stamps(self.config.folder)

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())


def _stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return the time and the size of each file of an adapter."""
    facts = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    return tuple((each.st_mtime_ns, each.st_size) for each in facts)


def _modules(config: AdapterConfig, file: Path) -> dict[str, StoredLowRank]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored_tensors([file]).items():
        found = NAME.fullmatch(name) if len(name) <= LONGEST_NAME else None
        if found is None:
            raise ConfigError(
                f"{name:.{LONGEST_NAME}} in {file} is not supported: only lora_A and lora_B of "
                "linear layers are."
            )
        halves.setdefault(found[1], {})[found[2]] = tensor
    if not halves:
        raise ConfigError(f"{file} has no tensors.")
    num_patterns = len(config.rank_pattern) + len(config.alpha_pattern)
    if len(halves) * num_patterns > MAX_MATCHES:
        raise ConfigError(
            f"{file} has {len(halves)} modules for the {num_patterns} patterns of {CONFIG}, which "
            f"are more than {MAX_MATCHES} pairs to compare."
        )
    return {module: _pair(config, module, file, found) for module, found in halves.items()}


def _pair(
    config: AdapterConfig, module: str, file: Path, found: dict[str, StoredTensor]
) -> StoredLowRank:
    for half in "AB":
        if half not in found:
            raise ConfigError(f"{file} has no lora_{half} of {module}.")
        tensor = found[half]
        if tensor.dtype not in FLOATS:
            raise ConfigError(
                f"{tensor.name} in {file} has dtype {tensor.dtype}; supported: {', '.join(FLOATS)}."
            )
    a, b, rank = found["A"], found["B"], config.rank_of(module)
    if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
        raise ConfigError(
            f"{module} in {file} has lora_A of shape {list(a.shape)} and lora_B of shape "
            f"{list(b.shape)}; {CONFIG} asks for [{rank}, in] and [out, {rank}]."
        )
    return StoredLowRank(a, b, config.scale_of(module))


def _finite(stored: StoredTensor) -> torch.Tensor:
    values = stored.read().float()
    if not values.isfinite().all():
        raise ConfigError(f"{stored.name} in {stored.file} holds NaN or infinity.")
    return values
