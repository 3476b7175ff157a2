"""The table of a token embedding, and the weight of a head, which may be tied to it."""

from __future__ import annotations

from typing import cast

import torch

from engine.checkpoint.parameters import Parameters
from engine.checkpoint.source import Source
from engine.checkpoint.weight_map import Target
from engine.layers.weights.pack import gives_rows
from engine.layers.weights.packed import RowsForm
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.embedding import embed
from engine.ops.kernels import Kernels
from engine.ops.quantize import CodesForm


class Table(Weight):
    """The table [count, dim] of a token embedding. Codes that it loads are for a tied head.

    If a tied head keeps the numbers of the table, the table is freed, and rows come from the head.
    """

    _head: RowsForm | None = None

    def load(self, name: str, target: Target, source: Source) -> None:
        """Take plain values, except if the codes of a tied head stand for the same numbers."""
        form = self.stored_form
        if form is not None:
            self.load_codes(target, source)
        if form is not None and form.is_exact:
            self._parameters["weight"] = None
        else:
            self.load_values(name, target, source)

    def move_to(self, head: RowsForm) -> None:
        """Free the table: `head` has the same rows."""
        self._head = head
        self._parameters["weight"] = None

    def lookup(self, ids: torch.Tensor, scale: float, kernels: Kernels) -> torch.Tensor:
        """Return the rows times `scale` [T, dim], for ids [T]."""
        if self._head is None:
            return embed(ids, self.plain, scale, kernels=kernels)
        rows = self._head.rows(ids)
        return rows if scale == 1.0 else rows * scale


class LogitsWeight(Weight):
    """The weight [vocabulary, dim] of a head: its own, or the table that it is tied to."""

    is_head = True

    def __init__(self, parameters: Parameters, rows: int, tied_to: Table | None) -> None:
        super().__init__(parameters, {"": rows})
        self._tied_to = tied_to
        if tied_to is not None:
            self.stored = tied_to.stored

    @property
    def plain(self) -> torch.Tensor:
        return super().plain if self._tied_to is None else self._tied_to.plain

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        table = self._tied_to
        shares = table is not None and (
            self.stored_form.is_exact
            if self.stored_form is not None
            else gives_rows(self.plain.shape[1], self.plain.dtype, kernels, quantization)
        )
        super().pack(kernels, quantization)
        if table is not None and shares:
            table.move_to(cast(RowsForm, self.packed))

    def keep_codes(self, form: CodesForm | None) -> None:
        super().keep_codes(form)
        if self._tied_to is not None:
            self._tied_to.keep_codes(form)
