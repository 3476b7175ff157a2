"""The table of a token embedding, and the weight of a head, which may be tied to it."""

from __future__ import annotations

import torch

from engine.checkpoint.parameters import Parameters
from engine.checkpoint.source import Source
from engine.checkpoint.weight_map import Target
from engine.layers.weights.weight import Weight
from engine.ops.quantize import CodesForm


class Table(Weight):
    """The table [count, dim] of a token embedding. Codes that it loads are for a tied head."""

    def load(self, name: str, target: Target, source: Source) -> None:
        if self.stored_form is not None:
            self.load_codes(target, source)
        self.load_values(name, target, source)


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

    def keep_codes(self, form: CodesForm | None) -> None:
        super().keep_codes(form)
        if self._tied_to is not None:
            self._tied_to.keep_codes(form)
