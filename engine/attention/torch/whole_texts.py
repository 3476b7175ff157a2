"""Attention without a KV cache: the sequences of an encoder's step see their own tokens only."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.attention.backend import GroupLayout, StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.torch.batching import QueryGroup, query_groups


def token_blocks(key: torch.Tensor, value: torch.Tensor, group: int) -> LayerKV:
    """Return the keys and values [T, Hkv, D] of a step as blocks of one token.

    The null block 0 comes first. `group` is the number of a KV group that the cache does not have.
    """
    keys = F.pad(key, (0, 0, 0, 0, 1, 0)).unsqueeze(2)
    values = F.pad(value, (0, 0, 0, 0, 1, 0)).unsqueeze(2)
    return LayerKV(keys, values, group)


def text_groups(layout: StepLayout) -> list[QueryGroup]:
    """Return the groups of an encoder's step, with tables of the blocks that `token_blocks` makes.

    Sequences are grouped as if they had blocks of the usual size.
    """
    assert layout.query_lens is not None, "an encoder's step is never captured"
    assert layout.seq_lens is not None
    assert list(layout.query_lens) == list(layout.seq_lens), "an encoder step must hold whole texts"
    size = layout.block_size
    blocks = text_blocks(layout, size)
    # Entries are tokens, counted from 1; entry 0 stands for no token.
    count = 1 + sum(-(-length // size) for length in layout.seq_lens)
    tokens = blocks.token_blocks.new_zeros(count, size)
    numbers = torch.arange(1, len(layout.positions) + 1, device=tokens.device)
    tokens[blocks.token_blocks, layout.token_offsets] = numbers
    groups = query_groups(layout, blocks)
    return [replace(group, tables=tokens[group.tables].flatten(1)) for group in groups]


def text_blocks(layout: StepLayout, size: int) -> GroupLayout:
    """Return block tables as if each text had consecutive blocks of `size` tokens.

    They are numbered from 1 in the step.
    """
    assert layout.seq_lens is not None
    ends = (-(-layout.lengths // size)).cumsum(0)  # [sequences] blocks up to each end
    firsts = 1 + torch.cat([ends.new_zeros(1), ends[:-1]])
    most_blocks = -(-max(layout.seq_lens) // size)
    tables = firsts[:, None] + torch.arange(most_blocks, device=ends.device)
    tables = tables.where(tables <= ends[:, None], 0)
    token_blocks = firsts.repeat_interleave(layout.lengths) + layout.positions // size
    return GroupLayout(tables, token_blocks)
