"""Asynchronous copies of numbers to the device and of tensors to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(
    columns: Sequence[npt.ArrayLike],
    device: torch.device,
    dtype: type[np.generic] = np.int64,
) -> tuple[torch.Tensor, ...]:
    """Copy `columns` to the device in one asynchronous copy; return one tensor per column.

    On CUDA each call uses a new pinned buffer, so no later write can change it during the copy.
    """
    arrays = [np.asarray(column, dtype) for column in columns]
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return packed.split([len(array) for array in arrays])


def upload(numbers: npt.NDArray[np.int64], target: torch.Tensor) -> None:
    """Copy numbers [N] to the int64 tensor `target` [N] in one asynchronous copy, as `to_device`.

    The copy waits for what the device is computing: until then it reads what `target` held.
    """
    packed = torch.from_numpy(numbers)
    if target.device.type == "cuda":
        packed = packed.pin_memory()
    target.copy_(packed, non_blocking=True)


class HostCopy:
    """An asynchronous copy of tensors to the host, with their values at construction.

    On CUDA the copy goes to new pinned buffers. Only `wait` makes the host wait for the device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """`device` holds the tensors. Without any, `wait` still waits for what it has queued."""
        self._event: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._tensors = [tensor.clone() for tensor in tensors]
            return
        self._tensors = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
