"""Fold a LoRA adapter into the weights of its base model: W + scale · B A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from engine.checkpoint.adapter.weights import StoredAdapter, StoredLowRank
from engine.checkpoint.stored import CHUNK, FLOATS, StoredTensor
from engine.errors import ConfigError
from engine.offline.plain import Checkpoint


class Fold:
    """The changes of an adapter to the tensors of its base model.

    Raises ConfigError if a module of the adapter is not in the base model.
    """

    def __init__(self, adapter: StoredAdapter, base: Checkpoint) -> None:
        self._adapter = adapter
        self._modules: dict[str, StoredLowRank] = {}  # by tensor of the base model
        for module, low_rank in adapter.modules.items():
            tensor = _tensor_of(module, base)
            self._check(module, low_rank, tensor)
            self._modules[tensor.name] = low_rank

    def _check(self, module: str, low_rank: StoredLowRank, tensor: StoredTensor) -> None:
        outputs, inputs = low_rank.shape
        is_turned = self._adapter.config.fan_in_fan_out
        due = (inputs, outputs) if is_turned else (outputs, inputs)
        if tensor.shape != due:
            raise ConfigError(
                f"The adapter in {self._adapter.config.folder} is for a weight of shape "
                f"{list(due)} in {module}; {tensor.name} in {tensor.file} has "
                f"{list(tensor.shape)}."
            )
        if tensor.dtype not in FLOATS:
            raise ConfigError(
                f"{tensor.name} in {tensor.file} has dtype {tensor.dtype}; an adapter can be "
                f"folded only into {', '.join(FLOATS)}."
            )

    def changes(self, name: str) -> Iterator[torch.Tensor] | None:
        """Return the change of a tensor in the pieces of `StoredTensor.floats`, if it changes.

        Raises ConfigError if the adapter holds NaN or infinity.
        """
        low_rank = self._modules.get(name)
        return None if low_rank is None else self._pieces(low_rank)

    def _pieces(self, low_rank: StoredLowRank) -> Iterator[torch.Tensor]:
        a, b = low_rank.read()
        left, right = (a.t(), b.t()) if self._adapter.config.fan_in_fan_out else (b, a)
        rows, columns = len(left), right.shape[1]
        for begin in range(0, rows * columns, CHUNK):
            end = min(begin + CHUNK, rows * columns)
            first, last = begin // columns, -(-end // columns)
            change = (left[first:last] @ right).flatten()
            yield change[begin - first * columns : end - first * columns]


def _tensor_of(module: str, base: Checkpoint) -> StoredTensor:
    """Return the weight of a module. A checkpoint may leave out the first parts of its name."""
    wanted = f"{module}.weight"
    tensors: Mapping[str, StoredTensor] = base.tensors
    found = [tensors[wanted]] if wanted in tensors else _alike(wanted, tensors)
    if len(found) != 1:
        raise ConfigError(f"The adapter is for {module}, which {base.folder} does not have.")
    return found[0]


def _alike(wanted: str, tensors: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    return [
        tensor
        for name, tensor in tensors.items()
        if wanted.endswith(f".{name}") or name.endswith(f".{wanted}")
    ]
