"""One tensor of a checkpoint while it is loaded: its shape, its values, and shards of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.checkpoint.stored import StoredTensor
from engine.checkpoint.tensors import CheckpointTensor
from engine.device.ranks import Shard
from engine.errors import ConfigError
from engine.ops.quantize import Codes

if TYPE_CHECKING:
    from engine.checkpoint.weight_map import Target

FLOATS = {torch.float32, torch.bfloat16, torch.float16}


class Source:
    """A tensor of a checkpoint, read when it is needed. All its targets share one copy.

    Parameters that it fills get `dtype` and `device`.
    """

    def __init__(
        self, name: str, tensor: CheckpointTensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name, self.file = name, tensor.file
        self.dtype, self.device = dtype, device
        self._tensor = tensor
        self._whole: torch.Tensor | None = None
        self._laid_out: tuple[Target, torch.Tensor] | None = None

    def shape(self, target: Target) -> tuple[int, ...]:
        """Return the shape of what `_as_rows` makes of the tensor.

        Raises ConfigError if it has another number of experts.
        """
        shape = self._stored_shape()
        if target.experts and (len(shape) < 2 or shape[0] != target.experts):
            raise ConfigError(
                f"{self.name} in {self.file} has shape {list(shape)}; config.json asks for "
                f"{target.experts} experts."
            )
        return tuple(_as_rows(target, torch.empty(shape, device="meta")).shape)

    def values(
        self, target: Target, part: str, rows: slice | torch.Tensor, shard: Shard | None
    ) -> torch.Tensor:
        """Return the values of a part, whose `rows` are given, that belong to a shard.

        Raises ConfigError if they are no floats, or not finite.
        """
        values = self._rows(target, part, rows, shard)
        if values.dtype not in FLOATS:
            raise ConfigError(
                f"{self.name} in {self.file} has dtype {values.dtype}; supported: float32, "
                "bfloat16, float16."
            )
        self._check_finite(*torch.aminmax(values))
        return values

    def limit(self) -> torch.Tensor:
        """Return a tensor [] that may be infinite. Raises ConfigError if it is no float, or NaN."""
        limit = self._read()
        if limit.dtype not in FLOATS or limit.isnan():
            raise ConfigError(
                f"{self.name} in {self.file} is {limit.item()}; it must be a float, or infinity."
            )
        return limit.to(self.device, self.dtype)

    def codes(self) -> Codes:
        """Return the codes of a tensor that has a form. Raises ConfigError if one is not finite."""
        assert not isinstance(self._tensor, StoredTensor)
        codes = self._tensor.codes()
        self._check_finite(codes.scales)
        if codes.offsets is not None:
            self._check_finite(codes.offsets)
        return codes

    def _check_finite(self, *values: torch.Tensor) -> None:
        if not all(each.isfinite().all() for each in values):
            raise ConfigError(f"{self.name} in {self.file} holds NaN or infinity.")

    def _rows(
        self, target: Target, part: str, rows: slice | torch.Tensor, shard: Shard | None
    ) -> torch.Tensor:
        is_plain = not target.transpose and not target.experts and not target.flattens
        if shard is not None and rows == slice(None) and is_plain:
            values = self._read_rows(shard.rows[part])
        else:
            values = self._in_rows(target)[rows]
            if shard is not None:
                values = values[shard.rows[part]]
        if shard is None or values.ndim == 1:
            return values
        return values[:, shard.columns]

    def _stored_shape(self) -> tuple[int, ...]:
        if isinstance(self._tensor, StoredTensor):
            return self._tensor.shape
        return self._read().shape

    def _read(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._tensor.read()
        return self._whole

    def _read_rows(self, rows: slice) -> torch.Tensor:
        """Return some rows; if the tensor is stored plainly, no others are read."""
        if self._whole is None and isinstance(self._tensor, StoredTensor):
            return self._tensor.read(rows)
        return self._read()[rows]

    def _in_rows(self, target: Target) -> torch.Tensor:
        """Return the whole tensor in the order of a target. All its parts share one copy."""
        if self._laid_out is None or self._laid_out[0] != target:
            self._laid_out = target, _as_rows(target, self._read())
        return self._laid_out[1]


def _as_rows(target: Target, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the order of the parameter, without a dimension of experts."""
    if target.transpose:
        tensor = tensor.mT
    if target.flattens:
        tensor = tensor.flatten(1)
    return tensor.flatten(0, 1) if target.experts else tensor
