"""What a captured step reads of the running sequences' rows, and what it writes back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.ops.dispatch import kernels_for


class DecodeInputs(NamedTuple):
    """The last known tokens of R rows, and where their KV goes for each of G groups of layers."""

    lengths: torch.Tensor  # [R] int32: known tokens
    positions: torch.Tensor  # [R] int64: lengths - 1
    input_ids: torch.Tensor  # [R] int64
    prev_ids: torch.Tensor  # [R] int64: the token before each; of the first, itself
    offsets: torch.Tensor  # [R] int64: the place in its block
    blocks: torch.Tensor  # [G, R] int64
    block_tables: torch.Tensor  # [G, R, W] int64


def gather_decode_inputs(
    row_ids: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """Of row_ids [R] int64, from tokens [N, L] and lengths [N] int32, block_tables [G, N, W]."""
    if kernels_for(tokens):
        from engine.kernels.rows import gather_inputs

        return DecodeInputs(*gather_inputs(row_ids, tokens, lengths, block_tables, block_size))
    known = lengths.index_select(0, row_ids)
    positions = known.long() - 1
    tables = block_tables.index_select(1, row_ids)
    entries = (positions // block_size).expand(len(tables), -1)[..., None]
    return DecodeInputs(
        known,
        positions,
        tokens[row_ids, positions].long(),
        tokens[row_ids, (positions - 1).clamp_(min=0)].long(),
        positions % block_size,
        tables.gather(2, entries).squeeze(2),
        tables,
    )


def append(
    row_ids: torch.Tensor,
    new: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    padding: int,
) -> None:
    """Write `new` [R] int64 behind the tokens [N, L] int32 of `row_ids` [R], and count them.

    What is below 0, where nothing could be drawn, becomes 0: a step launched before the host knows
    of it looks the token up. The row `padding`, which may come more than once, stays of its length.
    """
    if kernels_for(tokens):
        from engine.kernels.rows import append_tokens

        append_tokens(row_ids, new, tokens, lengths, padding)
        return
    known = lengths.index_select(0, row_ids)
    tokens.index_put_((row_ids, known.long()), new.clamp(min=0).int())
    lengths.index_copy_(0, row_ids, known + (row_ids != padding))
