"""nanochat's own checkpoint folders: model_<step>.pt with meta_<step>.json beside it."""

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

from engine.config import full_path, read_json
from engine.errors import ConfigError
from engine.weights.loader import FLOATS

MOST_NAMED = 20  # folders, in a message
# In a base folder the first of these is taken: upstream's own chat serves the fine-tuned model too.
STAGES = ("chatsft_checkpoints", "chatrl_checkpoints", "mid_checkpoints", "base_checkpoints")
Count = Annotated[int, Meta(ge=1)]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`model_config` of a meta file, under upstream's names."""

    sequence_len: Count
    vocab_size: Count
    n_layer: Count
    n_head: Count
    n_kv_head: Count
    n_embd: Count
    window_pattern: Annotated[str, Meta(pattern="^[sSlL]+$")] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One step of one model."""

    weights: Path
    meta: Path

    @property
    def tag(self) -> str:
        return self.weights.parent.name

    def model_config(self) -> ModelConfig:
        """Raises ConfigError where the meta file lacks one of the sizes or holds a key we do not
        know: a fork's architecture is not served as nanochat's."""
        try:
            return msgspec.convert(read_json(self.meta).get("model_config"), ModelConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.meta}, model_config: {error}") from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """Upstream's tensors by name, mapped from the file. Nothing in it is executed: raises
        ConfigError naming what is no plain tensor."""
        try:
            if unsafe := get_unsafe_globals_in_checkpoint(self.weights):
                raise ConfigError(
                    f"{self.weights} asks for {', '.join(unsafe)}; only plain tensors are read. "
                    "Nothing of it was executed."
                )
            state = torch.load(self.weights, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError) as error:
            raise ConfigError(f"{self.weights} is not a readable torch file: {error}") from error
        if not isinstance(state, dict):
            raise ConfigError(f"{self.weights} holds a {type(state).__name__}, not named tensors.")
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
                kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ConfigError(
                    f"{name} in {self.weights} is {kind}; expected are tensors of float32, "
                    "bfloat16 or float16."
                )
        return {str(name).removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


def find_checkpoint(folder: Path, step: int | None) -> Checkpoint:
    """The checkpoint of `step`, else of the highest, in a checkpoint folder; or in that of the
    deepest model (the d20 of d12 and d20) below `folder`. Raises ConfigError saying what is there.
    """
    folder = full_path(folder)
    stage = next((folder / name for name in STAGES if (folder / name).is_dir()), folder)
    steps = _steps(stage)
    if not steps:
        tags = [path for path in _folders(stage) if re.fullmatch(r"d\d+", path.name)]
        if not tags:
            names = [path.name for path in _folders(stage)]
            if len(names) > MOST_NAMED:
                names[MOST_NAMED:] = ["…"]
            found = ", ".join(names) or "none"
            raise ConfigError(
                f"{stage} holds neither model_<step>.pt nor folders called d<depth>. "
                f"Folders in it: {found}."
            )
        stage = max(tags, key=lambda path: int(path.name[1:]))
        steps = _steps(stage)
    if not steps:
        raise ConfigError(f"{stage} holds no model_<step>.pt.")
    if step is not None and step not in steps:
        found = ", ".join(map(str, sorted(steps)))
        raise ConfigError(f"{stage} has no model of step {step}; it has {found}.")
    weights = steps[max(steps) if step is None else step]
    meta = weights.with_name(weights.stem.replace("model_", "meta_") + ".json")
    return Checkpoint(weights, meta)


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"No folder at {folder}.")
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _steps(folder: Path) -> dict[int, Path]:
    named = ((re.fullmatch(r"model_(\d+)\.pt", path.name), path) for path in folder.glob("*.pt"))
    return {int(match[1]): path for match, path in named if match}
