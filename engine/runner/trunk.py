"""Whole texts through a decoder's trunk, over a KV cache that keeps nothing behind a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.scheduling.step import EncoderInput


def parts_within(
    encoder_inputs: Sequence[EncoderInput], kv: KVCache
) -> Iterator[Sequence[EncoderInput]]:
    """Yield the texts in parts that fit into the cache; a text of the longest length does."""
    most = kv.num_blocks // len(kv.groups)
    first = used = 0
    for index, encode in enumerate(encoder_inputs):
        blocks = -(-len(encode.tokens) // kv.block_size)
        if used + blocks > most:
            yield encoder_inputs[first:index]
            first, used = index, 0
        used += blocks
    yield encoder_inputs[first:]


def build_trunk_batch(
    encoder_inputs: Sequence[EncoderInput],
    kv: KVCache,
    backend: AttentionBackend,
    device: torch.device,
) -> ForwardBatch:
    """Concatenate all texts into one batch, as prompts that begin at position 0.

    Texts of one token must come first. Blocks of an earlier step are used again.
    """
    lens = [len(encode.tokens) for encode in encoder_inputs]
    counts = [-(-length // kv.block_size) for length in lens]
    used = sum(counts)
    if backend.reads_masked_keys:  # a NaN of an earlier text would pass the mask
        kv.scrub(range(1, 1 + used * len(kv.groups)))
    firsts = np.cumsum(counts) - counts + 1
    places = np.arange(max(counts))
    tables = np.where(places < np.array(counts)[:, None], firsts[:, None] + places, 0)
    positions = np.concatenate([np.arange(length) for length in lens])
    token_blocks = np.repeat(firsts, lens) + positions // kv.block_size
    columns = [
        np.concatenate([encode.tokens for encode in encoder_inputs]),
        positions,
        lens,
        np.cumsum(lens),
        token_blocks,
        tables.ravel(),
    ]
    ids, at, lengths, ends, of_tokens, of_texts = to_device(columns, device)
    of_texts = of_texts.view(tables.shape)
    groups = []
    for number, (group, stride) in enumerate(zip(kv.groups, kv.strides, strict=True)):
        before = number * used
        in_use = (of_texts > 0) * before
        groups.append(
            GroupLayout((of_texts + in_use) * stride, (of_tokens + before) * stride, group.window)
        )
    layout = StepLayout(
        num_decodes=lens.count(1),
        query_lens=lens,
        seq_lens=lens,
        lengths=lengths.int(),
        query_starts=F.pad(ends.int(), (1, 0)),
        groups=groups,
        token_offsets=at % kv.block_size,
        positions=at,
        block_size=kv.block_size,
    )
    return ForwardBatch(ids, at, ends - 1, kv, backend.plan(layout), len(positions))
