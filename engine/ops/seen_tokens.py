"""The tokens of a step that show images: their embeddings are not those of the token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """N tokens of a batch, and what the image encoder made for them."""

    index: torch.Tensor  # [N] int64 into the batch's tokens
    embeddings: torch.Tensor  # [N, width]: `hidden` numbers for the input, then for deeper layers
    last_keys: torch.Tensor | None = None  # [T] int64, see StepLayout; None: all tokens' own

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return the token embeddings `x` [T, hidden] with the images' in their places."""
        values = self.embeddings[:, : x.shape[1]].to(x.dtype)
        return x.index_copy(0, self.index, values)

    def num_deep(self, hidden: int) -> int:
        """Return how many layers behind the input add embeddings."""
        return self.embeddings.shape[1] // hidden - 1

    def add_deep(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Return hidden states `x` [T, hidden] with the embeddings for behind layer `layer` added.

        Layers count from 0. They are unchanged behind layers without any.
        """
        hidden = x.shape[1]
        if layer >= self.num_deep(hidden):
            return x
        start = (layer + 1) * hidden
        values = self.embeddings[:, start : start + hidden].to(x.dtype)
        return x.index_add(0, self.index, values)
