"""Load checkpoints, with every tensor accounted for.

A tensor that is missing, unexpected, of the wrong shape, or not finite raises a ConfigError naming
it. Nothing in a checkpoint is ever unpickled or executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.checkpoint.quantised.tensors import QuantisedTensor
from engine.checkpoint.stored import StoredTensor
from engine.checkpoint.tensors import CheckpointTensor, checkpoint_tensors
from engine.checkpoint.weight_map import Target, WeightMap
from engine.device.ranks import Share
from engine.errors import ConfigError, listed
from engine.ops.quantise import CodesForm, common_form

FLOATS = {torch.float32, torch.bfloat16, torch.float16}


def load_weights(
    model: nn.Module,
    weight_map: WeightMap,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda fraction: None,
    on_filled: Callable[[nn.Module], None] = lambda layer: None,
) -> None:
    """Fill every parameter of `model`, which is on the meta device.

    `on_filled` gets each layer when all its own parameters are filled, and may replace them.

    Raises ConfigError if the tensors in `folder` do not fit the model.
    """
    tensors = checkpoint_tensors(folder)
    targets, copies = assign(tensors, weight_map, folder)
    _check_copies(tensors, copies)
    wanted = [name for name in tensors if name in targets]  # in the order of the files
    filled: dict[str, set[str]] = {}
    for done, name in enumerate(wanted):
        for target in targets[name]:
            _refuse_conv1d(name, tensors[name], target)
        numbers = _Numbers(tensors[name])
        for target in targets[name]:
            if _give_codes(model, name, target, tensors[name]):
                _place(model, name, target, numbers, dtype, device, tensors[name].file)
            owner_name = target.parameter.rpartition(".")[0]
            parts = target.rows(_parts(model.get_submodule(owner_name)))
            filled.setdefault(target.parameter, set()).update(parts)
            if _is_filled(model, owner_name, filled):
                on_filled(model.get_submodule(owner_name))
        progress((done + 1) / len(targets))
    _check_filled(model, filled)
    model.to(device)


class StoredCodes(NamedTuple):
    """The codes of a checkpoint that can be kept, by parameter, and their commonest kind."""

    forms: dict[str, CodesForm]
    kind: str | None  # None: no codes


def stored_codes(weight_map: WeightMap, folder: Path) -> StoredCodes:
    """Return which codes of a quantised checkpoint can be kept.

    A parameter is left out if one of its parts has no codes that can.
    """
    tensors = checkpoint_tensors(folder)
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


def _give_codes(model: nn.Module, name: str, target: Target, tensor: CheckpointTensor) -> bool:
    """Give a layer the codes if it keeps them. Returns whether it needs the numbers."""
    owner: Any = model.get_submodule(target.parameter.rpartition(".")[0])
    if getattr(owner, "stored_form", None) is None or not target.parameter.endswith(".weight"):
        return True
    assert not isinstance(tensor, StoredTensor)
    codes = tensor.codes()
    for numbers in (codes.scales, codes.offsets):
        if numbers is not None and not numbers.isfinite().all():
            raise ConfigError(f"{name} in {tensor.file} holds NaN or infinity.")
    _check_shape(name, tensor.file, codes.codes.shape, target, owner.weight, owner)
    needs_numbers = False
    for part, rows in target.rows(_whole_parts(owner)).items():
        own = codes.of_outputs(rows)
        share: Share | None = getattr(owner, "share", None)
        if share is not None:
            own = own.of_outputs(share.rows[part]).of_inputs(share.columns)
        needs_numbers |= owner.take_codes(part, own)
    return needs_numbers


def _refuse_conv1d(name: str, tensor: CheckpointTensor, target: Target) -> None:
    """Raise ConfigError for a quantised layer of GPT-2's kind.

    Quantisers differ in which way round they store its matrix, and a square one tells nothing.
    """
    if target.transpose and isinstance(tensor, QuantisedTensor):
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
            prefix + spelling for prefix in prefixes for spelling in weight_map.spellings(name)
        ]
        return next((known for known in spellings if known in tensors), spellings[0])

    targets: dict[str, list[Target]] = {}
    for name, target in weight_map.targets.items():
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
    if not name.endswith(".bias") or not isinstance(weight, QuantisedTensor):
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


class _Numbers:
    """The numbers of a checkpoint's tensor, read when they are needed."""

    def __init__(self, tensor: CheckpointTensor) -> None:
        self._tensor = tensor
        self._whole: torch.Tensor | None = None
        self._laid_out: tuple[Target, torch.Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self._tensor, StoredTensor):
            return self._tensor.shape
        return self.whole().shape

    def whole(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._tensor.read()
        return self._whole

    def laid_out(self, target: Target) -> torch.Tensor:
        """Return the whole tensor in the order of a target. All its parts share one copy."""
        if self._laid_out is None or self._laid_out[0] != target:
            self._laid_out = target, _as_rows(target, self.whole())
        return self._laid_out[1]

    def rows(self, rows: slice) -> torch.Tensor:
        """Return some rows; if the tensor is stored plainly, no others are read."""
        if self._whole is None and isinstance(self._tensor, StoredTensor):
            return self._tensor.read(rows)
        return self.whole()[rows]


def _place(
    model: nn.Module,
    name: str,
    target: Target,
    numbers: _Numbers,
    dtype: torch.dtype,
    device: torch.device,
    file: Path,
) -> None:
    owner_name, _, attribute = target.parameter.rpartition(".")
    owner = model.get_submodule(owner_name)
    parameter: nn.Parameter = getattr(owner, attribute)
    if parameter.is_meta:
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        parameter = nn.Parameter(empty, requires_grad=False)
        setattr(owner, attribute, parameter)
    shape = _shape_as_rows(name, target, numbers.shape, file)
    _check_shape(name, file, shape, target, parameter, owner)
    parts, share = _parts(owner), getattr(owner, "share", None)
    for part, rows in target.rows(_whole_parts(owner)).items():
        own = _own_numbers(numbers, target, part, rows, share)
        if own.dtype not in FLOATS:
            raise ConfigError(
                f"{name} in {file} has dtype {own.dtype}; supported: float32, bfloat16, float16."
            )
        low, high = torch.aminmax(own)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ConfigError(f"{name} in {file} holds NaN or infinity.")
        parameter.data[parts[part]].copy_(own)


def _shape_as_rows(name: str, target: Target, shape: Sequence[int], file: Path) -> tuple[int, ...]:
    """Return the shape of what `_as_rows` makes of a tensor."""
    if target.experts and (len(shape) < 2 or shape[0] != target.experts):
        raise ConfigError(
            f"{name} in {file} has shape {list(shape)}; config.json asks for "
            f"{target.experts} experts."
        )
    return tuple(_as_rows(target, torch.empty(shape, device="meta")).shape)


def _as_rows(target: Target, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the order of the parameter, without a dimension of experts."""
    if target.transpose:
        tensor = tensor.mT
    return tensor.flatten(0, 1) if target.experts else tensor


def _own_numbers(
    numbers: _Numbers,
    target: Target,
    part: str,
    rows: slice | torch.Tensor,
    share: Share | None,
) -> torch.Tensor:
    """Return the numbers of one part, whose `rows` are given, that this rank keeps."""
    is_plain = not target.transpose and not target.experts
    if share is not None and rows == slice(None) and is_plain:
        own = numbers.rows(share.rows[part])
    else:
        own = numbers.laid_out(target)[rows]
        if share is not None:
            own = own[share.rows[part]]
    if share is None or own.ndim == 1:
        return own
    return own[:, share.columns]


def _parts(owner: nn.Module) -> Mapping[str, slice]:
    """Return the parts of a layer's parameters, each with its rows."""
    parts: Mapping[str, slice] = getattr(owner, "parts", {"": slice(None)})
    return parts


def _whole_parts(owner: nn.Module) -> Mapping[str, slice]:
    """Return the parts of a layer's parameters as they are without ranks."""
    share: Share | None = getattr(owner, "share", None)
    return _parts(owner) if share is None else share.parts


def _check_shape(
    name: str,
    file: Path,
    found: Sequence[int],
    target: Target,
    parameter: torch.Tensor,
    owner: nn.Module,
) -> None:
    """Raise ConfigError if a tensor does not have the shape that config.json asks for."""
    share: Share | None = getattr(owner, "share", None)
    if share is None:
        due = list(parameter[target.place(_parts(owner))].shape)
    else:
        place = target.place(share.parts).indices(share.shape[0])
        due = [len(range(*place)), share.shape[1]][: parameter.ndim]
    if list(found) != due:
        raise ConfigError(f"{name} in {file} has shape {list(found)}; config.json asks for {due}.")


def _is_filled(model: nn.Module, owner_name: str, filled: Mapping[str, set[str]]) -> bool:
    """Return whether all parts of a layer's own parameters are filled."""
    owner = model.get_submodule(owner_name)
    prefix = f"{owner_name}." if owner_name else ""
    names = [prefix + name for name, _ in owner.named_parameters(recurse=False)]
    return all(filled.get(name, set()) == _parts(owner).keys() for name in names)


def _check_filled(model: nn.Module, filled: dict[str, set[str]]) -> None:
    """Assert that the weight map fills every parameter. A gap is a mistake in the model file."""
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"no entry of the weight map fills {name}"
        wanted = _parts(model.get_submodule(name.rpartition(".")[0])).keys()
        assert filled[name] == wanted, f"the weight map fills only {filled[name]} of {name}"
