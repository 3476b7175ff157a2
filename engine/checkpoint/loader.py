"""Load checkpoints, with every tensor accounted for.

A tensor that is missing, unexpected, of the wrong shape, or not finite raises a ConfigError naming
it. Nothing in a checkpoint is ever unpickled or executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from engine.checkpoint.parameters import parameters_of
from engine.checkpoint.quantized.tensors import QuantizedTensor
from engine.checkpoint.source import Source
from engine.checkpoint.stored import StoredTensor
from engine.checkpoint.tensors import CheckpointTensor, checkpoint_tensors
from engine.checkpoint.weight_map import Target, WeightMap
from engine.errors import ConfigError, listed
from engine.ops.quantize import CodesForm, common_form


def load_weights(
    model: nn.Module,
    weight_map: WeightMap,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Mapping[str, CheckpointTensor] | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    on_filled: Callable[[nn.Module], None] = lambda layer: None,
) -> None:
    """Fill every parameter of `model`, which is on the meta device.

    `on_filled` gets each layer when all its own parameters are filled, and may replace them.
    `tensors` are those of `folder`, if they are known.

    Raises ConfigError if the tensors in `folder` do not fit the model.
    """
    if tensors is None:
        tensors = checkpoint_tensors(folder)
    targets, copies = assign(tensors, weight_map, folder)
    _check_copies(tensors, copies)
    wanted = [name for name in tensors if name in targets]  # in the order of the files
    filled: dict[str, set[str]] = {}
    for done, name in enumerate(wanted):
        for target in targets[name]:
            _refuse_conv1d(name, tensors[name], target)
        source = Source(name, tensors[name], dtype, device)
        for target in targets[name]:
            owner, _, attribute = target.parameter.rpartition(".")
            layer = model.get_submodule(owner)
            parameters = parameters_of(layer)
            parameters.load(attribute, target, source)
            filled.setdefault(target.parameter, set()).update(target.rows(parameters.slices))
            if _is_filled(layer, owner, filled):
                on_filled(layer)
        progress((done + 1) / len(targets))
    _check_filled(model, filled)
    model.to(device)


class StoredCodes(NamedTuple):
    """The codes of a checkpoint that can be kept, by parameter, and their commonest kind."""

    forms: dict[str, CodesForm]
    kind: str | None  # None: no codes


def stored_codes(
    weight_map: WeightMap, folder: Path, tensors: Mapping[str, CheckpointTensor]
) -> StoredCodes:
    """Return which codes of a quantised checkpoint, the `tensors` of `folder`, can be kept.

    A parameter is left out if one of its parts has no codes that can.
    """
    targets, _ = assign(tensors, weight_map, folder)
    forms: dict[str, list[CodesForm | None]] = {}
    kinds: Counter[str] = Counter()
    for name, tensor in tensors.items():
        form = None
        if not isinstance(tensor, StoredTensor) and (form := tensor.form):
            kinds[tensor.kind] += 1
        for target in targets.get(name, ()):
            forms.setdefault(target.parameter, []).append(None if target.transpose else form)
    common: dict[str, CodesForm] = {}
    for name, each in forms.items():
        known = [form for form in each if form]
        if len(known) == len(each):
            common[name] = common_form(known)
    kind = kinds.most_common(1)[0][0] if kinds else None
    return StoredCodes(common, kind)


def _refuse_conv1d(name: str, tensor: CheckpointTensor, target: Target) -> None:
    """Raise ConfigError for a quantised layer of GPT-2's kind.

    Quantisers differ in which way round they store its matrix, and a square one tells nothing.
    """
    if target.transpose and isinstance(tensor, QuantizedTensor):
        raise ConfigError(
            f"{name} in {tensor.file} is a quantised Conv1D, as of GPT-2, which is not served; use "
            "the original checkpoint."
        )


def assign(
    tensors: Mapping[str, CheckpointTensor], weight_map: WeightMap, folder: Path
) -> tuple[dict[str, list[Target]], dict[str, str]]:
    """Return (checkpoint name -> its targets, copy -> its original).

    Raises ConfigError listing the tensors that are missing or unexpected.
    """
    prefixes = sorted(  # the commonest first, so that errors use the prefix of this checkpoint
        weight_map.prefixes,
        key=lambda prefix: -sum(prefix + name in tensors for name in weight_map.targets),
    )

    def spelled(name: str) -> str:
        spellings = [
            prefix + spelling for spelling in weight_map.spellings(name) for prefix in prefixes
        ]
        return next((known for known in spellings if known in tensors), spellings[0])

    targets: dict[str, list[Target]] = {}
    fused = {name: target for name, target in weight_map.fused.items() if spelled(name) in tensors}
    if fused:  # a missing tensor of such a checkpoint is named as the others are
        apart = {t.parameter for name, t in weight_map.targets.items() if spelled(name) in tensors}
        fused |= {n: t for n, t in weight_map.fused.items() if t.parameter not in apart}
    whole = {target.parameter for target in fused.values()}
    single = {n: t for n, t in weight_map.targets.items() if t.parameter not in whole}
    for name, target in (single | fused).items():
        targets.setdefault(spelled(name), []).append(target)
    copies: dict[str, str] = {}
    for name, also in weight_map.aliases.items():
        spellings = {prefix + other for prefix in prefixes for other in also}
        for copy in spellings & tensors.keys() - targets.keys():
            copies.setdefault(copy, spelled(name))
    missing = sorted(targets.keys() - tensors.keys())
    extra = sorted(
        name
        for name in tensors.keys() - targets.keys() - copies.keys()
        if not name.endswith(tuple(weight_map.ignored))
        and not name.startswith(tuple(weight_map.ignored_prefixes))
        and not _is_zero_bias(name, tensors)
    )
    if missing:
        raise ConfigError(f"The weights in {folder} lack {listed(missing)}.")
    if extra:
        file = tensors[extra[0]].file
        raise ConfigError(f"{file} holds {listed(extra)}, which this architecture does not use.")
    return targets, copies


def _is_zero_bias(name: str, tensors: Mapping[str, CheckpointTensor]) -> bool:
    """Whether a tensor is a bias of zeros, which AutoGPTQ adds to layers that have none."""
    weight = tensors.get(name.removesuffix("bias") + "weight")
    if not name.endswith(".bias") or not isinstance(weight, QuantizedTensor):
        return False
    return not tensors[name].read().any()


def _check_copies(tensors: Mapping[str, CheckpointTensor], copies: dict[str, str]) -> None:
    """Raise ConfigError if two copies of a tensor differ: which one is right is unknown."""
    for copy, original in copies.items():
        if not torch.equal(tensors[copy].read().float(), tensors[original].read().float()):
            file = tensors[copy].file
            raise ConfigError(
                f"{copy} in {file} differs from {original}, but config.json ties them."
            )


def _is_filled(layer: nn.Module, name: str, filled: Mapping[str, set[str]]) -> bool:
    """Return whether all parts of a layer's own parameters are filled."""
    prefix = f"{name}." if name else ""
    names = [prefix + parameter for parameter, _ in layer.named_parameters(recurse=False)]
    parts = parameters_of(layer).slices.keys()
    return all(filled.get(each, set()) == parts for each in names)


def _check_filled(model: nn.Module, filled: dict[str, set[str]]) -> None:
    """Assert that the weight map fills every parameter. A gap is a mistake in the model file."""
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"no entry of the weight map fills {name}"
        wanted = parameters_of(model.get_submodule(name.rpartition(".")[0])).slices.keys()
        assert filled[name] == wanted, f"the weight map fills only {filled[name]} of {name}"
