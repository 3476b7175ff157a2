"""Read the inputs of a captured decode step from SequenceRows, and append sampled tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.ops.kernels import Kernels


class DecodeInputs(NamedTuple):
    """The last known tokens of R rows, and their KV slots in each of G KV groups."""

    lengths: torch.Tensor  # [R] int32: known tokens
    positions: torch.Tensor  # [R] int64: lengths - 1
    input_ids: torch.Tensor  # [R] int64
    offsets: torch.Tensor  # [R] int64: each token's offset in its block
    blocks: torch.Tensor  # [G, R] int64
    block_tables: torch.Tensor  # [G, R, W] int64


def gather_decode_inputs(
    row_ids: torch.Tensor,
    ahead: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    kernels: Kernels,
) -> DecodeInputs:
    """Gather the DecodeInputs of `row_ids` [R] int64, whose last tokens are `ahead` [R] int64.

    The known tokens are `lengths` [N] int32; drafted ones follow. `tokens` is [N, L] int32,
    `block_tables` [G, N, W] int64.
    """
    if kernels == "triton":
        from engine.kernels.triton.sequence_rows import gather_inputs

        return DecodeInputs(
            *gather_inputs(row_ids, ahead, tokens, lengths, block_tables, block_size)
        )
    if kernels == "numba":
        from engine.kernels.numba.sequence_rows import gather_inputs as gather_on_cpu

        return DecodeInputs(
            *gather_on_cpu(row_ids, ahead, tokens, lengths, block_tables, block_size)
        )
    known = lengths.index_select(0, row_ids) + ahead.int()
    positions = known.long() - 1
    tables = block_tables.index_select(1, row_ids)
    entries = (positions // block_size).expand(len(tables), -1)[..., None]
    return DecodeInputs(
        known,
        positions,
        tokens[row_ids, positions].long(),
        positions % block_size,
        tables.gather(2, entries).squeeze(2),
        tables,
    )


def append(
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    ahead: torch.Tensor,
    new: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    padding: int,
    *,
    kernels: Kernels,
) -> None:
    """Write `new` [R] int64 at `positions` [R] of the tokens [N, L] int32 of `row_ids` [R].

    A row's length grows if its known tokens end there. A token sampled behind drafted ones, `ahead`
    [R] of the known ones, is not counted: whether it is valid is not known yet.

    A negative token, where sampling failed, is stored as 0. A step launched before the host learns
    of the failure still looks the token up in the embedding. The row `padding` keeps its length; it
    may occur more than once.
    """
    if kernels == "numba":
        from engine.kernels.numba.sequence_rows import append_tokens

        append_tokens(row_ids, positions, ahead, new, tokens, lengths, padding)
        return
    tokens.index_put_((row_ids, positions), new.clamp(min=0).int())
    is_known = (row_ids != padding) & (ahead == 0)
    lengths.index_add_(0, row_ids, is_known.int())
