"""The encoder's part of a step: whole texts in, hidden states or pooled vectors out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.models.base import Model
from engine.runner.forward import TEXT_TOKENS_MULTIPLE, ModelForward
from engine.scheduling.step import EncoderInput


class Encoder:
    """Encodes the texts of a step with a model's encoder."""

    def __init__(
        self, model: Model, kv: KVCache, backend: AttentionBackend, forward: ModelForward
    ) -> None:
        self._model, self._kv, self._backend, self._forward = model, kv, backend, forward

    def __call__(self, inputs: Sequence[EncoderInput], device: torch.device) -> torch.Tensor | None:
        """Write the KV of encoder prompts, or return the vectors [texts, hidden] of texts."""
        batch = build_encoder_batch(inputs, self._kv, self._backend, device)
        batch = batch.padded(self._forward.round_up(batch.num_tokens, TEXT_TOKENS_MULTIPLE))
        hidden = self._model.encode(batch)[: batch.num_tokens]
        return pool(hidden, inputs) if inputs[0].pooling else None


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


def pool(hidden: torch.Tensor, encoder_inputs: Sequence[EncoderInput]) -> torch.Tensor:
    """Pool the hidden states [T, hidden] of concatenated texts to vectors [texts, hidden], fp32."""
    vectors = []
    for encode, states in zip(
        encoder_inputs, hidden.split([len(e.tokens) for e in encoder_inputs]), strict=True
    ):
        match encode.pooling:
            case "cls":
                vectors.append(states[0].float())
            case "last":
                vectors.append(states[-1].float())
            case "mean":
                vectors.append(states.float().mean(0))
    return torch.stack(vectors)
