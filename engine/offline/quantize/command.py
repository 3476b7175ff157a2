"""Write a quantised folder: `penstock quantize`. `main` takes MODEL, OUT and the form."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from rich.filesize import decimal
from torch import nn

from engine.checkpoint.folder import full_path, weight_files
from engine.checkpoint.image_processor import with_image_processor
from engine.checkpoint.loader import assign
from engine.checkpoint.quantized.layer import FLOATS, check_shape
from engine.checkpoint.stored import StoredTensor
from engine.checkpoint.weight_map import Target
from engine.errors import ConfigError, listed
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.models.base import Model, on_meta_device
from engine.models.registry import model_class
from engine.offline.new_folder_command import write_folder
from engine.offline.plain import Checkpoint
from engine.offline.quantize.experts import one_by_one
from engine.offline.quantize.forms import FORMS, Form
from engine.offline.quantize.write import write_quantized


class Layers(NamedTuple):
    """The linear layers of a checkpoint."""

    rounded: Collection[str]  # names of the weights that are rounded
    ignored: Sequence[str]  # names of layers that stay plain, or patterns after "re:"
    fused: Sequence[str]  # names of tensors of all experts, which stay plain


def quantize_folder(
    model: str, out: Path, kind: str, progress: Callable[[float], None] = lambda share: None
) -> Layers:
    """Write the model in the folder `model` to the folder `out`, rounded to a form of FORMS.

    Raises ConfigError if the model is quantised already or not served, if its weights cannot be
    rounded, or if `out` is not empty or cannot be written.
    """
    if kind not in FORMS:
        raise ConfigError(f"--quantization: {kind!r} is not one of {', '.join(FORMS)}.")
    source = Checkpoint.open(model, "quantised again")
    config = with_image_processor(source.config, source.folder)
    _, _, build = model_class(config)
    module = on_meta_device(build, config, 1, torch.float32)
    source = one_by_one(source, module, cast(Model, module).weight_map())
    layers = _layers_of(module, source, FORMS[kind])
    write_quantized(source, out, kind, layers.rounded, layers.ignored, progress)
    return layers


def _layers_of(module: nn.Module, source: Checkpoint, form: Form) -> Layers:
    """Find the linear layers, and which of them can be rounded.

    A head stays plain, because logits need the precision. Raises ConfigError if no layer is left.
    """
    weight_map = cast(Model, module).weight_map()
    targets, copies = assign(source.tensors, weight_map, source.folder)
    ignored_prefixes = tuple(weight_map.ignored_prefixes)
    rounded, fused = set(), []
    # The head of a model with tied embeddings is a layer without a tensor.
    heads = [layer for layer in module.modules() if isinstance(layer, LMHead)]
    ignored = ["lm_head" for head in heads if head.tied_to is not None]
    for name, tensor in source.tensors.items():
        owners = {target: _owner(module, target) for target in targets.get(name, ())}
        if any(target.experts and len(tensor.shape) > 2 for target in owners):
            fused.append(name)
        is_matrix = name.endswith(".weight") and len(tensor.shape) == 2
        is_embedding = any(isinstance(owner, TokenEmbedding) for owner in owners.values())
        if name in copies or not is_matrix or is_embedding or name.startswith(ignored_prefixes):
            continue
        if _is_rounded(tensor, owners, form):
            rounded.add(name)
        else:
            ignored.append(name.removesuffix(".weight"))
    if not rounded:
        raise ConfigError(f"{source.folder} has no linear layer that can be rounded so.")
    return Layers(rounded, ignored + _patterns(ignored_prefixes, source), fused)


def _owner(module: nn.Module, target: Target) -> nn.Module:
    return module.get_submodule(target.parameter.rpartition(".")[0])


def _is_rounded(tensor: StoredTensor, owners: Mapping[Target, nn.Module], form: Form) -> bool:
    """Return whether a matrix is the weight of a linear layer that the form takes.

    Raises ConfigError if it has another shape or dtype than the layer's, or if it is transposed.
    """
    is_linear = False
    for target, owner in owners.items():
        if not isinstance(owner, Linear) or not owner.is_rounded:
            continue
        if target.transpose:
            raise ConfigError(
                f"{tensor.name} in {tensor.file} is a Conv1D, as of GPT-2. Quantised ones are not "
                "served, so they are not written."
            )
        check_shape(tensor, owner.tensors.expected_shape("weight", target))
        if tensor.dtype not in FLOATS:
            raise ConfigError(
                f"{tensor.name} in {tensor.file} has dtype {tensor.dtype}; supported: "
                f"{', '.join(FLOATS)}."
            )
        is_linear = True
    return is_linear and form.takes(tensor.shape[1])


def _patterns(prefixes: Sequence[str], source: Checkpoint) -> list[str]:
    """Return patterns for the parts of a checkpoint that are not served, such as a vision tower.

    Programs differ in what they put before such a name.
    """
    present = [p for p in prefixes if any(name.startswith(p) for name in source.tensors)]
    return [f"re:.*{re.escape(prefix)}.*" for prefix in present]


def main() -> int:
    """Quantise and return the exit status of `write_folder`."""
    return write_folder("quantising", _quantize_as_given)


def _quantize_as_given(progress: Callable[[float], None]) -> list[str]:
    model, out, kind = sys.argv[1:]
    # Follow links: the finished folder is renamed to `out`, which cannot replace a link.
    folder = full_path(Path(out))
    layers = quantize_folder(model, folder, kind, progress)
    size = sum(file.stat().st_size for file in weight_files(folder))
    lines = [f"wrote {folder}: {len(layers.rounded)} weights as {kind}, {decimal(size)} in all"]
    if layers.ignored:
        lines.append(f"linear layers that stay plain: {listed(layers.ignored)}")
    if layers.fused:
        lines.append(
            f"experts that stay plain, because one tensor holds those of a layer: "
            f"{listed(layers.fused)}"
        )
    return lines
