"""The encoder's part of a step: whole texts in, their KV, vectors or logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.layers.pooler import Pooler, TextSpans
from engine.models.base import Classifier, Model
from engine.runner.forward import TEXT_TOKENS_MULTIPLE, ModelForward
from engine.runner.trunk import build_trunk_batch, parts_within
from engine.scheduling.step import EncoderInput


class Encoder:
    """Encodes the texts of a step with a model's encoder."""

    def __init__(
        self,
        model: Model,
        pooler: Pooler | None,
        head: Classifier | None,
        kv: KVCache,
        backend: AttentionBackend,
        forward: ModelForward,
        trunk_kv: KVCache | None = None,
    ) -> None:
        """Without a `pooler` all texts are sources.

        With `trunk_kv` the model is a decoder's trunk, which reads texts as prompts.
        """
        self._model, self._kv, self._backend, self._forward = model, kv, backend, forward
        self._pooler, self._trunk_kv = pooler, trunk_kv
        self._head = head
        self._has_types = (getattr(model.config, "token_types", None) or 0) > 1

    def __call__(self, inputs: Sequence[EncoderInput], device: torch.device) -> torch.Tensor | None:
        """Write the KV of encoder prompts, or return the vectors or logits [texts, n] of texts."""
        if not inputs[0].is_pooled:
            self._encode(inputs, device)
            return None
        parts = [inputs] if self._trunk_kv is None else parts_within(inputs, self._trunk_kv)
        vectors = [self._pool(self._encode(part, device), part) for part in parts]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def _encode(self, inputs: Sequence[EncoderInput], device: torch.device) -> torch.Tensor:
        """Return the hidden states [T, hidden] of the texts."""
        if self._trunk_kv is not None:
            batch = build_trunk_batch(inputs, self._trunk_kv, self._backend, device)
            return self._forward(batch)[: batch.num_tokens]
        batch = build_encoder_batch(inputs, self._kv, self._backend, device)
        if self._has_types:
            batch = replace(batch, types=token_types(inputs, device))
        batch = batch.padded(self._forward.round_up(batch.num_tokens, TEXT_TOKENS_MULTIPLE))
        return self._model.encode(batch)[: batch.num_tokens]

    def _pool(self, hidden: torch.Tensor, inputs: Sequence[EncoderInput]) -> torch.Tensor:
        assert self._pooler is not None, "only encoders take texts to pool"
        passed_over = None if self._head is None else self._head.passed_over
        spans = TextSpans.of(
            [len(text.tokens) for text in inputs],
            [text.skip for text in inputs],
            () if passed_over is None else [trailing(text.tokens, passed_over) for text in inputs],
        )
        pooled = self._pooler.pool(hidden, spans)
        count = len(pooled)
        rows = self._forward.round_up(count, TEXT_TOKENS_MULTIPLE)
        pooled = F.pad(pooled, (0, 0, 0, rows - count))
        if self._head is not None:
            return self._head.classify(pooled.to(hidden.dtype))[:count].float()
        vectors: torch.Tensor = self._pooler(pooled)
        return vectors[:count]


def trailing(tokens: Sequence[int], token: int) -> int:
    """Return how many tokens at the end equal `token`; all but one in a text without others."""
    count = 0
    while count < len(tokens) - 1 and tokens[-1 - count] == token:
        count += 1
    return count


def build_encoder_batch(
    encoder_inputs: Sequence[EncoderInput],
    kv: KVCache,
    backend: AttentionBackend,
    device: torch.device,
) -> ForwardBatch:
    """Concatenate all texts into one batch. A source has blocks in each cross group."""
    lens = [len(encode.tokens) for encode in encoder_inputs]
    input_ids, positions, lengths, ends = to_device(
        [
            np.concatenate([encode.tokens for encode in encoder_inputs]),
            np.concatenate([np.arange(length) for length in lens]),
            lens,
            np.cumsum(lens),
        ],
        device,
    )
    layout = StepLayout(
        num_decodes=0,
        query_lens=lens,
        seq_lens=lens,
        lengths=lengths.int(),
        query_starts=F.pad(ends.int(), (1, 0)),
        groups=[
            _source_blocks(encoder_inputs, group, kv, device) for group in range(len(kv.groups))
        ],
        token_offsets=positions % kv.block_size,
        positions=positions,
        block_size=kv.block_size,
    )
    plan = backend.plan(layout)
    return ForwardBatch(input_ids, positions, ends - 1, kv, plan, len(positions))


def token_types(
    encoder_inputs: Sequence[EncoderInput], device: torch.device
) -> torch.Tensor | None:
    """Return the type of each token: 1 in the second text of a pair. None if there is no pair."""
    if not any(encode.second for encode in encoder_inputs):
        return None
    types = [
        np.arange(len(encode.tokens)) >= (encode.second or len(encode.tokens))
        for encode in encoder_inputs
    ]
    return to_device([np.concatenate(types)], device)[0]


def _source_blocks(
    encoder_inputs: Sequence[EncoderInput], group: int, kv: KVCache, device: torch.device
) -> GroupLayout:
    """Return the blocks of the source tokens in one group; empty if it is not a cross group."""
    blocks = [
        table[position // kv.block_size] * kv.strides[group]
        for encode in encoder_inputs
        for number, table in encode.blocks
        if number == group
        for position in range(len(encode.tokens))
    ]
    nothing_read = torch.zeros(len(encoder_inputs), 1, dtype=torch.int64, device=device)
    (token_blocks,) = to_device([blocks], device)
    return GroupLayout(nothing_read, token_blocks)
