"""LensPlan: attention of one whole text that keeps its weights, without a KV cache."""

from __future__ import annotations

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.layout import StepLayout
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import QueryGroup
from engine.attention.torch.mask import attention_mask
from engine.inspect.residual import ResidualTaps
from engine.lens_messages import AttentionWeights, Stack
from engine.ops.softcap import softcap

MOST_SCORES = 1 << 25  # computed at once, 128 MiB each of scores and weights
STACKS: dict[str, Stack] = {"causal": "decoder", "full": "encoder", "cross": "cross"}


class LensPlan:
    """An AttentionPlan for one text of an encoder or a decoder, or for both of a translation.

    It holds the keys of a source itself, so that it neither reads nor writes a cache. All layers
    append their weights to `attention`. Scores and weights are fp32.
    """

    layout: StepLayout  # never read: kernels that need it are switched off for a lens

    def __init__(self, taps: ResidualTaps, *, keeps_weights: bool) -> None:
        self._keeps_weights = keeps_weights
        self.attention: list[AttentionWeights] = []
        self._taps = taps
        # By id of the layer's KV: keys and values [T, Hkv, D] of the source.
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        self._sources[id(kv)] = key, value

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if spec.kind == "cross":
            key, value = self._sources[id(kv)]
        assert key is not None
        assert value is not None
        shared = spec.num_heads // spec.num_kv_heads
        keys = key.float().repeat_interleave(shared, dim=1)  # [K, H, D]
        values = value.float().repeat_interleave(shared, dim=1)
        size = max(1, MOST_SCORES // (spec.num_heads * len(key)))
        outputs, weights, scores = [], [], []
        for first in range(0, len(query), size):
            part = query[first : first + size]
            found = torch.einsum("qhd,khd->hqk", part.float(), keys) * spec.scale
            capped = found
            if spec.softcap is not None:
                capped = softcap(found, spec.softcap, kernels="torch")
            mask = attention_mask(_group(first, part, key), spec, len(key), torch.float32, bias)
            shares = _softmax(capped + mask[0], sinks)  # [H, queries, K]
            outputs.append(torch.einsum("hqk,khd->qhd", shares, values))
            if self._keeps_weights:
                weights.append(shares)
                scores.append(found)
        if self._keeps_weights:
            self.attention.append(_packed(spec, torch.cat(weights, 1), torch.cat(scores, 1)))
        self._taps.attended("cross" if spec.kind == "cross" else "attention")
        return torch.cat(outputs).to(query.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys [H, queries, K]. With `sinks` [H] they add up to less than 1."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    own = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat((scores, own), -1), dim=-1)[..., :-1]


def _group(first: int, query: torch.Tensor, key: torch.Tensor) -> QueryGroup:
    """Return the group of one sequence, whose queries [T, H, D] begin at position `first`."""
    positions = torch.arange(first, first + len(query), device=query.device)
    return QueryGroup(
        first=0,
        sequences=1,
        count=len(query),
        positions=positions[None],
        tables=positions[None],
        first_keys=None,
        last_keys=positions.new_tensor([len(key) - 1]),
    )


def _packed(spec: AttentionSpec, weights: torch.Tensor, scores: torch.Tensor) -> AttentionWeights:
    heads, queries, keys = weights.shape
    is_causal = spec.kind == "causal"

    def pack(values: torch.Tensor) -> bytes:
        if is_causal:
            values = values[:, torch.ones_like(values[0], dtype=torch.bool).tril()]
        return as_bytes(values)

    return AttentionWeights(
        stack=STACKS[spec.kind],
        heads=heads,
        queries=queries,
        keys=keys,
        weights=pack(weights),
        window=spec.window,
        softcap=spec.softcap,
        scores=b"" if spec.softcap is None else pack(scores),
    )


def as_bytes(values: torch.Tensor) -> bytes:
    """Return a tensor as bytes of little-endian fp32."""
    return values.float().cpu().numpy().astype("<f4").tobytes()


def attention_bytes(spec: AttentionSpec, tokens: int) -> int:
    """Return the bytes that a layer's AttentionWeights take for texts of `tokens` tokens."""
    pairs = tokens * (tokens + 1) // 2 if spec.kind == "causal" else tokens * tokens
    return spec.num_heads * pairs * 4 * (1 if spec.softcap is None else 2)
