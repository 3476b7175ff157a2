"""Load checkpoints of safetensors or GGUF files, with every tensor accounted for.

A tensor that is missing, unexpected, of the wrong shape, or not finite raises a ConfigError naming
it. Nothing in a checkpoint is ever unpickled or executed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.checkpoint.folder import safetensors_header, weight_files
from engine.checkpoint.gguf.parts import is_gguf, present_parts
from engine.checkpoint.gguf.tensors import read_tensors
from engine.checkpoint.weight_map import Target, WeightMap
from engine.errors import ConfigError

FLOATS = {torch.float32, torch.bfloat16, torch.float16}


def load_weights(
    model: nn.Module,
    weight_map: WeightMap,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Fill every parameter of `model`, which is on the meta device.

    Raises ConfigError if the tensors in `folder` do not fit the model.
    """
    names = tensor_files(folder)
    targets, copies = _assign(names, weight_map, folder)
    _check_copies(names, copies)
    filled: dict[str, set[str]] = {}
    for done, (name, tensor) in enumerate(_tensors(names, targets)):
        for target in targets[name]:
            _place(model, name, target, tensor, dtype, device, names[name])
            filled.setdefault(target.parameter, set()).add(target.part)
        progress((done + 1) / len(targets))
    _check_filled(model, filled)
    model.to(device)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor.

    Raises ConfigError if a file is damaged or a tensor is in two files.
    """
    files = weight_files(folder)
    if is_gguf(files[0]):
        return {name: tensor.stored.file for name, tensor in read_tensors(files).items()}
    names: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            if name in names:
                raise ConfigError(f"{name} is in both {names[name]} and {file}; remove one.")
            names[name] = file
    return names


def _names(file: Path) -> list[str]:
    safetensors_header(file)  # describes a truncated file better than the library
    try:
        with safe_open(file, framework="pt") as shard:
            return list(shard.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a readable safetensors file: {error}") from error


def _assign(
    names: dict[str, Path], weight_map: WeightMap, folder: Path
) -> tuple[dict[str, list[Target]], dict[str, str]]:
    """Return (checkpoint name -> its targets, copy -> its original).

    Raises ConfigError listing the tensors that are missing or unexpected.
    """
    prefixes = sorted(  # the commonest first, so that errors use the prefix of this checkpoint
        weight_map.prefixes,
        key=lambda prefix: -sum(prefix + name in names for name in weight_map.targets),
    )

    def spelled(name: str) -> str:
        spellings = [
            prefix + spelling for prefix in prefixes for spelling in weight_map.spellings(name)
        ]
        return next((known for known in spellings if known in names), spellings[0])

    targets: dict[str, list[Target]] = {}
    for name, target in weight_map.targets.items():
        targets.setdefault(spelled(name), []).append(target)
    copies: dict[str, str] = {}
    for name, also in weight_map.aliases.items():
        spellings = {prefix + other for prefix in prefixes for other in also}
        for copy in spellings & names.keys() - targets.keys():
            copies.setdefault(copy, spelled(name))
    missing = sorted(targets.keys() - names.keys())
    extra = sorted(
        name
        for name in names.keys() - targets.keys() - copies.keys()
        if not name.endswith(tuple(weight_map.ignored))
        and not name.startswith(tuple(weight_map.ignored_prefixes))
    )
    if missing:
        raise ConfigError(f"The weights in {folder} lack {_listed(missing)}.")
    if extra:
        raise ConfigError(
            f"{names[extra[0]]} holds {_listed(extra)}, which this architecture does not use."
        )
    return targets, copies


def _check_copies(names: dict[str, Path], copies: dict[str, str]) -> None:
    """Raise ConfigError if two copies of a tensor differ: which one is right is unknown."""
    for copy, original in copies.items():
        tensors = dict(_tensors(names, {copy, original}))
        if not torch.equal(tensors[copy].float(), tensors[original].float()):
            raise ConfigError(
                f"{copy} in {names[copy]} differs from {original}, but config.json ties them."
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _tensors(names: dict[str, Path], wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(set(names.values()))
    if files and is_gguf(files[0]):
        for name, tensor in read_tensors(present_parts(files[0])).items():
            if name in wanted:
                yield name, tensor.read()
        return
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    if name in wanted:
                        yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a readable safetensors file: {error}") from error


def _place(
    model: nn.Module,
    name: str,
    target: Target,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    file: Path,
) -> None:
    if tensor.dtype not in FLOATS:
        raise ConfigError(
            f"{name} in {file} has dtype {tensor.dtype}; supported: float32, bfloat16, float16."
        )
    if target.transpose:
        tensor = tensor.t()
    owner_name, _, attribute = target.parameter.rpartition(".")
    owner = model.get_submodule(owner_name)
    parameter: nn.Parameter = getattr(owner, attribute)
    if parameter.is_meta:
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        parameter = nn.Parameter(empty, requires_grad=False)
        setattr(owner, attribute, parameter)
    parts: dict[str, slice] = getattr(owner, "parts", {"": slice(None)})
    rows = parameter.data[parts[target.part]]
    if rows.shape != tensor.shape:
        raise ConfigError(
            f"{name} in {file} has shape {list(tensor.shape)}; config.json asks for "
            f"{list(rows.shape)}."
        )
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ConfigError(f"{name} in {file} holds NaN or infinity.")
    rows.copy_(tensor)


def _check_filled(model: nn.Module, filled: dict[str, set[str]]) -> None:
    """Assert that the weight map fills every parameter. A gap is a mistake in the model file."""
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"no entry of the weight map fills {name}"
        owner = model.get_submodule(name.rpartition(".")[0])
        wanted = set(getattr(owner, "parts", {"": None}))
        assert filled[name] == wanted, f"the weight map fills only {filled[name]} of {name}"
