"""Count what a step launches on a device: kernels of Triton, and operations of torch.

It works on the fake GPU (`fake_cuda`). Views, allocations and copies between host and device
launch no kernel. Every other operation of torch counts as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPLOAD, DOWNLOAD = "upload", "download"
ALLOCATES = "aten::empty", "aten::new_empty"


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class LaunchCounter(TorchDispatchMode):
    """Counts the operations of torch that launch, by name, and the uploads and downloads."""

    def __init__(self, launches: Counter[str]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._can_decompose():
            with self:  # an operation that consists of others counts as these
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        name = self._name(func, _tensors((args, kwargs)), _tensors(result))
        if name is not None:
            self._launches[name] += 1
        return result

    def _name(
        self, func: Any, given: list[torch.Tensor], results: list[torch.Tensor]
    ) -> str | None:
        """Return the name that a call counts by, or None if it launches nothing."""
        schema = func._schema
        if schema.name.startswith(ALLOCATES):
            return None
        on_device = [tensor.is_cuda for tensor in results]
        if schema.name in ("aten::copy_", "aten::_to_copy"):
            source = given[-1].is_cuda
            if on_device[0] != source:
                return DOWNLOAD if source else UPLOAD
        if not any(on_device) or not any(tensor.numel() for tensor in results):
            return None
        held = {tensor.untyped_storage()._cdata for tensor in given}
        if not schema.is_mutable and all(
            tensor.untyped_storage()._cdata in held for tensor in results
        ):
            return None  # a view
        return str(schema.name)


@contextmanager
def counted(launches: Counter[str]) -> Iterator[Counter[str]]:
    """Count launches from now on, in the counter of `fake_cuda`, which starts at zero."""
    launches.clear()
    with LaunchCounter(launches):
        yield launches


def kernels(launches: Counter[str]) -> int:
    """Return the number of launches, without uploads and downloads."""
    return launches.total() - launches[UPLOAD] - launches[DOWNLOAD]
