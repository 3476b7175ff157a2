"""Experts whose matrices a checkpoint keeps in one tensor.

Where an architecture also reads them one by one, each is written as a layer of its own. The format
has no form for others.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from engine.checkpoint.loader import assign
from engine.checkpoint.parameters import parameters_of
from engine.checkpoint.quantized.layer import check_shape
from engine.checkpoint.stored import StoredTensor
from engine.checkpoint.weight_map import Target, WeightMap
from engine.offline.plain import Checkpoint


def one_by_one(source: Checkpoint, module: nn.Module, weight_map: WeightMap) -> Checkpoint:
    """Return the checkpoint with a tensor for each matrix of an expert, where `module` reads it.

    Raises ConfigError if a tensor of all experts has another shape than the layer.
    """
    fused = {target.parameter: name for name, target in weight_map.fused.items()}
    targets, _ = assign(source.tensors, weight_map, source.folder)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in source.tensors.items():
        found = [target for target in targets.get(name, ()) if target in weight_map.fused.values()]
        if not found:
            tensors[name] = tensor
            continue
        [target] = found
        prefix = name.removesuffix(fused[target.parameter])
        for part in _parts(tensor, target, module, weight_map):
            tensors[prefix + part.name] = replace(part, name=prefix + part.name)
    return replace(source, tensors=tensors)


def _parts(
    tensor: StoredTensor, target: Target, module: nn.Module, weight_map: WeightMap
) -> list[StoredTensor]:
    """Return the matrices of a tensor of all experts, under their names without a prefix."""
    owner, _, attribute = target.parameter.rpartition(".")
    layer = parameters_of(module.get_submodule(owner))
    outputs, inputs = layer.expected_shape(attribute, target)
    check_shape(tensor, (target.experts, outputs // target.experts, inputs))
    row = tensor.size // outputs
    names = {
        each.part: name
        for name, each in weight_map.targets.items()
        if each.parameter == target.parameter
    }
    found = []
    for part, rows in target.rows(layer.slices).items():
        assert isinstance(rows, slice)  # one group: the rows of a part follow each other
        count, begin = rows.stop - rows.start, tensor.begin + rows.start * row
        found.append(
            StoredTensor(
                names[part], tensor.file, tensor.dtype, (count, inputs), begin, count * row
            )
        )
    return found
