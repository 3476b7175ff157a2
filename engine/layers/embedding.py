"""Token and position embeddings, and the head that computes logits from hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.device.ranks import Ranks, Share
from engine.layers.position_tables import PositionTables
from engine.layers.weights.pack import pack, pack_codes
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.embedding import embed
from engine.ops.kernels import Kernels
from engine.ops.linear import linear
from engine.ops.quantize import Codes, CodesForm


class TokenEmbedding(nn.Module):
    """Lookup of rows in a table [count, dim] by index.

    A tied head takes the checkpoint's codes of the table from `stored`. If the table is
    `divisible`, ranks may share its rows. If it has `column_units`, they may share its columns, in
    this number of equal units.
    """

    scale = 1.0  # factor on the rows

    def __init__(
        self, count: int, dim: int, *, divisible: bool = False, column_units: int | None = None
    ) -> None:
        super().__init__()
        self.divisible, self.column_units = divisible, column_units
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.share: Share | None = None  # None: the whole table
        self._ranks = Ranks()
        self.stored_form: CodesForm | None = None
        self.stored: Codes | None = None
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the rows or columns of this rank. Raises ConfigError if that is not possible."""
        if self.divisible:
            self._ranks = ranks
            self.share = _share_of_table(self.weight, ranks)
        elif self.column_units is not None:
            count, dim = self.weight.shape
            rows = {"": slice(0, count)}
            self.share = Share((count, dim), rows, rows, ranks.units(dim, self.column_units))
        if self.share is not None:
            self.weight = _own_part(self.weight, self.share)

    def take_codes(self, part: str, codes: Codes) -> bool:
        """Take the codes of the table, for the tied head. Returns whether numbers are needed."""
        self.stored = codes
        return True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.share is None or not self.divisible:
            return embed(ids, self.weight, self.scale, kernels=self.kernels)
        own = self.share.rows[""]
        elsewhere = (ids < own.start) | (ids >= own.stop)
        places = (ids - own.start).masked_fill_(elsewhere, 0)
        rows = embed(places, self.weight, self.scale, kernels=self.kernels)
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


class LMHead(nn.Module):
    """Logits [L, vocabulary] in fp32.

    In bf16, steps of 1/8 lie between large logits, which would make the best two tokens equal.

    If tied to a token embedding, the head has no parameter of its own. Ranks share its rows.
    """

    def __init__(self, vocab_size: int, dim: int, *, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        self.weight = None if tied_to else nn.Parameter(torch.empty(vocab_size, dim))
        self._tied_to = [tied_to] if tied_to else []  # a list, so that it is not a submodule
        # If set, the checkpoint's codes are kept: its own, or the token embedding's.
        self.stored_form: CodesForm | None = None
        self.stored: Codes | None = None
        self._packed: Weight | None = None
        self.kernels: Kernels = "torch"
        self.vocab_size = vocab_size
        self.share: Share | None = None  # None: the whole weight
        self._ranks = Ranks()

    def divide(self, ranks: Ranks) -> None:
        """Keep the rows of this rank. Raises ConfigError if there are too few."""
        self._ranks = ranks
        if self.weight is None:  # the token embedding divides its table
            assert self.tied_to is not None
            assert self.tied_to.divisible, "a tied head needs a token embedding that is divisible"
            return
        self.share = _share_of_table(self.weight, ranks)
        self.weight = _own_part(self.weight, self.share)

    @property
    def tied_to(self) -> TokenEmbedding | None:
        return self._tied_to[0] if self._tied_to else None

    @property
    def table(self) -> torch.Tensor:
        """The weight [vocabulary, dim]: its own or the token embedding's."""
        table = self._tied_to[0].weight if self._tied_to else self.weight
        assert table is not None
        return table

    def take_codes(self, part: str, codes: Codes) -> bool:
        """Take a weight with a `stored_form`. Returns whether numbers are needed."""
        self.stored = codes
        return False

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weight. See `pack`; of a tied head, the token embedding keeps its table."""
        if self.stored_form is not None:
            owner = self.tied_to or self
            assert owner.stored is not None
            self._packed = pack_codes(owner.stored, None, wide=True)
            owner.stored = self.weight = None
            return
        table = self.table.data
        self._packed = pack(
            table, None, kernels=self.kernels, is_head=True, quantization=quantization
        )
        if self._packed is not None:
            self.weight = None

    @property
    def packed_bytes(self) -> int:
        """The bytes of the packed weight, 0 if it is plain."""
        return 0 if self._packed is None else self._packed.nbytes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            logits = self._packed(hidden)
        else:
            logits = linear(hidden, self.table, dtype=torch.float32, kernels=self.kernels)
        if self._ranks.count == 1:
            return logits
        missing = self._ranks.widest(self.vocab_size) - logits.shape[1]  # on the last rank
        joined = self._ranks.join(F.pad(logits, (0, missing)))
        return joined[:, : self.vocab_size].contiguous()


def _share_of_table(table: torch.Tensor, ranks: Ranks) -> Share:
    """Return the share of a rank in a table [rows, dim]."""
    rows, width = table.shape
    return Share((rows, width), {"": slice(0, rows)}, {"": ranks.rows(rows)}, slice(0, width))


def _own_part(table: torch.Tensor, share: Share) -> nn.Parameter:
    """Return the parameter, without numbers, for a rank's part of a table."""
    rows, columns = share.rows[""], share.columns
    return nn.Parameter(table.new_empty(rows.stop - rows.start, columns.stop - columns.start))
