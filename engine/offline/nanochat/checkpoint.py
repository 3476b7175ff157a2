"""nanochat's own checkpoint folders, which contain model_<step>.pt and meta_<step>.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from torch.serialization import get_unsafe_globals_in_checkpoint

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import full_path
from engine.checkpoint.source import FLOATS
from engine.errors import ConfigError, listed, one_line

MAX_NAMED = 20  # folders that an error message lists
# The first of these in a base folder is used. Upstream's chat prefers the fine-tuned model, too.
STAGES = ("chatsft_checkpoints", "chatrl_checkpoints", "mid_checkpoints", "base_checkpoints")
Count = Annotated[int, Meta(ge=1)]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`model_config` of a meta file, with upstream's names."""

    sequence_len: Count
    vocab_size: Count
    n_layer: Count
    n_head: Count
    n_kv_head: Count
    n_embd: Count
    window_pattern: Annotated[str, Meta(pattern="^[sSlL]+$")] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one training step of one model."""

    weights: Path
    meta: Path

    @property
    def tag(self) -> str:
        return self.weights.parent.name

    def model_config(self) -> ModelConfig:
        """Return the sizes of the model from its meta file.

        Raises ConfigError if a size is missing or a key is unknown: an unknown key means a fork
        with another architecture.
        """
        try:
            return msgspec.convert(read_json(self.meta).get("model_config"), ModelConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.meta}, model_config: {error}") from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return upstream's tensors by name, memory-mapped. Nothing in the file is executed.

        Raises ConfigError naming any entry that is not a plain tensor.
        """
        try:
            if unsafe := get_unsafe_globals_in_checkpoint(self.weights):
                raise ConfigError(
                    f"{self.weights} refers to {listed(unsafe)}; only plain tensors are read. "
                    "Nothing in the file was executed."
                )
            state = torch.load(self.weights, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError) as error:
            raise ConfigError(
                f"{self.weights} is not a readable torch file: {one_line(error)}"
            ) from error
        if not isinstance(state, dict):
            raise ConfigError(f"{self.weights} holds a {type(state).__name__}; expected a dict.")
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
                kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ConfigError(
                    f"{name} in {self.weights} is {kind}; supported: tensors of float32, "
                    "bfloat16, float16."
                )
        return {str(name).removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


def find_checkpoint(folder: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint of `step`, or of the last step, in a checkpoint folder.

    If `folder` contains several models, the deepest one is used: d20 of d12 and d20. Raises
    ConfigError, listing the steps or folders found, if there is no such checkpoint.
    """
    folder = full_path(folder)
    stage = next((folder / name for name in STAGES if (folder / name).is_dir()), folder)
    steps = _steps(stage)
    if not steps:
        tags = [path for path in _folders(stage) if re.fullmatch(r"d\d+", path.name)]
        if not tags:
            names = [path.name for path in _folders(stage)]
            found = listed(names, MAX_NAMED) or "none"
            raise ConfigError(
                f"{stage} holds neither model_<step>.pt nor folders called d<depth>. "
                f"Folders in it: {found}."
            )
        stage = max(tags, key=lambda path: int(path.name[1:]))
        steps = _steps(stage)
    if not steps:
        raise ConfigError(f"{stage} holds no model_<step>.pt.")
    if step is not None and step not in steps:
        found = listed(sorted(steps), MAX_NAMED)
        raise ConfigError(f"{stage} has no model of step {step}; steps found: {found}.")
    weights = steps[max(steps) if step is None else step]
    meta = weights.with_name(weights.stem.replace("model_", "meta_") + ".json")
    return Checkpoint(weights, meta)


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.")
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _steps(folder: Path) -> dict[int, Path]:
    named = ((re.fullmatch(r"model_(\d+)\.pt", path.name), path) for path in folder.glob("*.pt"))
    return {int(match[1]): path for match, path in named if match}
