"""Token and position embeddings, and the head that computes logits from hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.checkpoint.parameters import LoadedLayer
from engine.device.ranks import Ranks, Shard
from engine.layers.position_tables import PositionTables
from engine.layers.weights.table import LogitsWeight, Table
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels


class TokenEmbedding(LoadedLayer):
    """Lookup of rows in a table [count, dim] by index.

    If the table is `divisible`, ranks may divide its rows. If it has `column_units`, they
    may divide its columns in this number of equal units.
    """

    scale = 1.0  # factor on the rows

    def __init__(
        self, count: int, dim: int, *, divisible: bool = False, column_units: int | None = None
    ) -> None:
        super().__init__()
        self.divisible, self.column_units = divisible, column_units
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.tensors: Table = Table(self._parameters, {"": count})
        self._ranks = Ranks()
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the rows or columns of this rank. Raises ConfigError if that is not possible."""
        count, dim = self.weight.shape
        whole = {"": slice(0, count)}
        if self.divisible:
            self._ranks = ranks
            rows = {"": ranks.rows(count)}
            self.tensors.take_shard(Shard((count, dim), whole, rows, slice(0, dim)))
        elif self.column_units is not None:
            columns = ranks.units(dim, self.column_units)
            self.tensors.take_shard(Shard((count, dim), whole, whole, columns))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        shard = self.tensors.shard
        if shard is None or not self.divisible:
            return self.tensors.lookup(ids, self.scale, self.kernels)
        first, past = shard.rows[""].start, shard.rows[""].stop
        elsewhere = (ids < first) | (ids >= past)
        indices = (ids - first).masked_fill_(elsewhere, 0)
        rows = self.tensors.lookup(indices, self.scale, self.kernels)
        return self._ranks.sum(rows.masked_fill(elsewhere[:, None], 0))


class ScaledTokenEmbedding(TokenEmbedding):
    """Rows times `scale`. As in training, `scale` is rounded to the model's dtype first."""

    def __init__(
        self, count: int, dim: int, scale: float, dtype: torch.dtype, *, divisible: bool = False
    ) -> None:
        super().__init__(count, dim, divisible=divisible)
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()


class Sinusoids(PositionTables):
    """Sinusoidal position embedding, wavelengths from 2 pi up (arXiv 1706.03762, section 3.5).

    All sines come before all cosines, as in Marian.
    """

    table: torch.Tensor  # [count, dim]

    def __init__(self, count: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__({"table": (count, dim)}, dtype)
        pairs = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
        self.frequencies = 10000.0 ** (-pairs / dim)  # [dim / 2], the angle per position
        if not self.is_planned:
            self.fill()

    def fill(self) -> None:
        count, dim = self.table.shape
        positions = torch.arange(count, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.frequencies)
        table = torch.cat((angles.sin(), angles.cos()[:, : dim // 2]), dim=1)
        self.table = table.to(self.table.dtype)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table.index_select(0, positions)


class LMHead(LoadedLayer):
    """Logits [L, vocabulary] in fp32.

    In bf16, steps of 1/8 lie between large logits, which would make the best two tokens equal.

    If tied to a token embedding, the head has no parameter of its own. Ranks divide its rows.
    """

    def __init__(self, vocab_size: int, dim: int, *, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        self.weight = None if tied_to else nn.Parameter(torch.empty(vocab_size, dim))
        self._tied_to = [tied_to] if tied_to else []  # a list, so that it is not a submodule
        table = tied_to.tensors if tied_to else None
        self.tensors: LogitsWeight = LogitsWeight(self._parameters, vocab_size, table)
        self.kernels: Kernels = "torch"
        self.vocab_size = vocab_size
        self._ranks = Ranks()

    def divide(self, ranks: Ranks) -> None:
        """Keep the rows of this rank. Raises ConfigError if there are too few."""
        self._ranks = ranks
        if self.weight is None:  # the token embedding divides its table
            assert self.tied_to is not None
            assert self.tied_to.divisible, "a tied head needs a token embedding that is divisible"
            return
        count, dim = self.weight.shape
        whole, rows = {"": slice(0, count)}, {"": ranks.rows(count)}
        self.tensors.take_shard(Shard((count, dim), whole, rows, slice(0, dim)))

    @property
    def tied_to(self) -> TokenEmbedding | None:
        return self._tied_to[0] if self._tied_to else None

    @property
    def table(self) -> torch.Tensor:
        """The weight [vocabulary, dim]: its own or the token embedding's."""
        return self.tensors.plain

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weight, see `Weight.pack`; of a tied head, the table may be freed."""
        self.tensors.pack(self.kernels, quantization)

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of `hidden` [L, dim]; for `out` see Model.logits."""
        if self._ranks.count == 1:
            return self.tensors.multiply(hidden, self.kernels, out)
        logits = self.tensors.multiply(hidden, self.kernels)
        missing = self._ranks.widest(self.vocab_size) - logits.shape[1]  # on the last rank
        joined = self._ranks.join(F.pad(logits, (0, missing)))
        return joined[:, : self.vocab_size].contiguous()
