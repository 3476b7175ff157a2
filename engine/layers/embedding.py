"""Token and position embeddings, and the head that computes logits from hidden states."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.weights.pack import Weight, pack, pack_codes
from engine.ops.codes import Quantization
from engine.ops.embedding import embed
from engine.ops.kernels import Kernels
from engine.ops.linear import linear
from engine.ops.quantise import Codes, CodesForm


class TokenEmbedding(nn.Module):
    """Lookup of rows in a table [count, dim] by index.

    A tied head takes the checkpoint's codes of the table from `stored`.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.stored_form: CodesForm | None = None
        self.stored: Codes | None = None
        self.kernels: Kernels = "torch"

    def take_codes(self, part: str, codes: Codes) -> bool:
        """Take the codes of the table, for the tied head. Returns whether numbers are needed."""
        self.stored = codes
        return True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return embed(ids, self.weight, kernels=self.kernels)


class ScaledTokenEmbedding(TokenEmbedding):
    """Rows times `scale`. As in training, `scale` is rounded to the model's dtype first."""

    def __init__(self, count: int, dim: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__(count, dim)
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return embed(ids, self.weight, self.scale, kernels=self.kernels)


class Sinusoids(nn.Module):
    """Sinusoidal position embedding, wavelengths from 2 pi up (arXiv 1706.03762, section 3.5).

    All sines come before all cosines, as in Marian.
    """

    table: torch.Tensor  # [count, dim]

    def __init__(self, count: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        positions = torch.arange(count, dtype=torch.float64, device="cpu")
        pairs = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
        self.frequencies = 10000.0 ** (-pairs / dim)  # [dim / 2], the angle per position
        angles = torch.outer(positions, self.frequencies)
        table = torch.cat((angles.sin(), angles.cos()[:, : dim // 2]), dim=1)
        self.register_buffer("table", table.to(dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table.index_select(0, positions)


class LMHead(nn.Module):
    """Logits [L, vocabulary] in fp32.

    In bf16, steps of 1/8 lie between large logits, which would make the best two tokens equal. With
    a packed weight, our own kernels return fp32; oneDNN alone rounds to the weight's dtype.

    If tied to a token embedding, the head has no parameter of its own.
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
            return self._packed(hidden)
        return linear(hidden, self.table, dtype=torch.float32, kernels=self.kernels)
