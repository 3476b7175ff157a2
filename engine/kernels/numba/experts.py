"""Linear layers of several experts, or of several heads, in one launch; each with its own rows.

They multiply as they would alone, so a row has the same bits as from its expert's layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import CACHE_LINE, ROW_FIELD, ExpertsCall
from engine.kernels.numba.linear import PackedMultiply
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.prepared import PreparedRows


class LayerKernel(Protocol):
    """A linear layer whose kernel takes any number of rows."""

    @property
    def outputs(self) -> int: ...

    @property
    def kernel(self) -> int:
        """Its address."""

    @property
    def call(self) -> ctypes.Structure:
        """Its arguments, without those of the rows."""

    def prepared(self, x: torch.Tensor) -> PreparedRows: ...

    def empty(self, rows: int) -> torch.Tensor: ...


class ExpertsMultiply:
    """Products of rows with the weights of experts, which are of one form.

    The first layer has the most outputs. Another one may have fewer; the rest of its rows is not
    written then. A layer may read only the first of a row's inputs.
    """

    def __init__(self, layers: Sequence[LayerKernel]) -> None:
        self._first = layers[0]
        self._layers = list(layers)
        self._kind = type(self._first.call)
        self._calls = (self._kind * len(layers))()
        self._counters = np.zeros((len(layers), CACHE_LINE // 8), dtype=np.int64)
        for expert, layer in enumerate(layers):
            self.put(expert, layer)
        store = kernel_store()
        self._share = store.address("experts.share_kernel")
        self._run = store.address("experts.run_experts_kernel")

    def put(self, expert: int, layer: LayerKernel) -> None:
        """Replace the layer of an expert. No kernel may run meanwhile."""
        first, own = self._first, self._calls[expert]
        assert layer.kernel == first.kernel
        assert layer.outputs <= first.outputs
        self._layers[expert] = layer  # the call holds only addresses
        ctypes.memmove(ctypes.byref(own), ctypes.byref(layer.call), ctypes.sizeof(self._kind))
        own.counter = self._counters[expert].ctypes.data
        own.out_bytes = first.call.out_bytes

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return [P, out] for x [P, in]. Rows starts[e] to starts[e + 1] are those of expert e."""
        first = self._first
        out = first.empty(len(x))
        prepared = first.prepared(x)  # the call holds only addresses
        self._launch(prepared.fields | PreparedRows({"out": out}).fields, starts)
        return out[:, : first.outputs]

    def _launch(self, given: Mapping[str, tuple[int, int]], starts: torch.Tensor) -> None:
        """Run all layers. Expert e gets the value of each field for the row starts[e]."""
        rows = [(self._offset(name), base, step) for name, (base, step) in given.items()]
        fields = np.array(rows, dtype=ROW_FIELD)
        call = ExpertsCall(
            experts=len(self._layers),
            starts=starts.data_ptr(),
            kernel=self._first.kernel,
            calls=ctypes.addressof(self._calls),
            call_bytes=ctypes.sizeof(self._kind),
            counters=self._counters.ctypes.data,
            fields=fields.ctypes.data,
            num_fields=len(fields),
            rows_offset=self._offset("rows"),
        )
        in_threads(self._share, call, alone=True, constants=fields)
        in_threads(self._run, call)

    def _offset(self, name: str) -> int:
        offset: int = getattr(self._kind, name).offset
        return offset


class HeadsMultiply(ExpertsMultiply):
    """Products of each head's rows with the weight of the head, of equal sizes."""

    def __init__(self, layers: Sequence[PackedMultiply]) -> None:
        super().__init__(layers)
        self._numbers = torch.arange(len(layers) + 1)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, heads, out] for x [T, heads, in]. Nothing is copied."""
        tokens, heads, _ = x.shape
        assert x.stride(2) == 1
        out = self._first.empty(tokens * heads).unflatten(0, (tokens, heads))
        given = {
            "rows": (tokens, 0),
            "x": (x.data_ptr(), x.stride(1) * x.itemsize),
            "x_bytes": (x.stride(0) * x.itemsize, 0),
            "out": (out.data_ptr(), out.stride(1) * out.itemsize),
            "out_bytes": (out.stride(0) * out.itemsize, 0),
        }
        self._launch(given, self._numbers)
        return out
