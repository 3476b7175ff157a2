"""LensPlan: attention of one whole text that keeps its weights, without a KV cache."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from engine.attention.backend import StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import QueryGroup
from engine.attention.torch.mask import attention_mask
from engine.attention.weights_size import MOST_SCORES
from engine.inspect.head_summary import SummaryBuilder
from engine.inspect.residual import ResidualTaps
from engine.ops.softcap import softcap
from engine.protocol.lens import AttentionWeights, Stack

STACKS: dict[str, Stack] = {"causal": "decoder", "full": "encoder", "cross": "cross"}


class LensPlan:
    """An AttentionPlan for one text of an encoder or a decoder, or for both of a translation.

    It holds the keys of a source itself, so that it neither reads nor writes a cache. All layers
    append to `attention`. Scores and weights are fp32; they are computed in parts.
    """

    layout: StepLayout  # never read: kernels that need it are switched off for a lens

    def __init__(
        self,
        taps: ResidualTaps,
        tokens: torch.Tensor,
        kept: Collection[int] | None,
        read_again: Collection[int] = (),
        image_keys: torch.Tensor | None = None,
    ) -> None:
        """`tokens` [T] int64 are the decoder's. `kept` are the layers of each stack whose weights
        are kept; with None nothing is appended. `read_again` has the id of each LayerKV that later
        layers read, too. `image_keys` [T] int64 are the last keys of the decoder's tokens, where
        those of an image see all of it.
        """
        self._tokens, self._kept = tokens, kept
        self._read_again = read_again
        self._image_keys = image_keys
        self.attention: list[AttentionWeights] = []
        self._taps = taps
        # By id of the LayerKV: keys and values [T, Hkv, D] of the source, or of an earlier layer.
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
        assert value is not None
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
        if key is not None and spec.value_dim is not None:
            value = key[..., : spec.value_dim]
        if key is None or value is None:
            key, value = self._sources[id(kv)]
        elif id(kv) in self._read_again:
            self._sources[id(kv)] = key, value
        shared = spec.num_heads // spec.num_kv_heads
        keys = key.float().repeat_interleave(shared, dim=1)  # [K, H, D]
        values = value.float().repeat_interleave(shared, dim=1)
        size = max(1, MOST_SCORES // (spec.num_heads * len(key)))
        number = self._taps.attended("cross" if spec.kind == "cross" else "attention")
        layer = None
        if self._kept is not None:
            tokens = self._tokens if spec.kind == "causal" else None
            shape = len(query), len(key)
            layer = LayerWeights(spec, number, shape, tokens, keeps_weights=number in self._kept)
        outputs = []
        for first in range(0, len(query), size):
            part = query[first : first + size]
            found = torch.einsum("qhd,khd->hqk", part.float(), keys) * spec.scale
            capped = found
            if spec.softcap is not None:
                capped = softcap(found, spec.softcap, kernels="torch")
            seen = None if self._image_keys is None else self._image_keys[first : first + len(part)]
            group = _group(first, part, key, seen)
            mask = attention_mask(group, spec, len(key), torch.float32, bias)
            shares = _softmax(capped + mask[0], sinks)  # [H, queries, K]
            outputs.append(torch.einsum("hqk,khd->qhd", shares, values))
            if layer is not None:
                layer.add(first, shares, found)
        if layer is not None:
            self.attention.append(layer.result())
        return torch.cat(outputs).to(query.dtype)


class LayerWeights:
    """Collects the weights of layer `number` of a stack, of `size` (queries, keys)."""

    def __init__(
        self,
        spec: AttentionSpec,
        number: int,
        size: tuple[int, int],
        tokens: torch.Tensor | None,
        *,
        keeps_weights: bool,
    ) -> None:
        self._spec, self._number = spec, number
        self._queries, self._keys = size
        self._summary = SummaryBuilder(spec, self._keys, tokens)
        pairs = self._pairs(self._queries) if keeps_weights else 0
        self._weights = np.empty((spec.num_heads, pairs), "<f4")
        self._scores = np.empty((spec.num_heads, pairs if spec.softcap else 0), "<f4")

    def _pairs(self, queries: int) -> int:
        """Return the number of weights that the first queries of a head have."""
        if self._spec.kind == "causal":
            return queries * (queries + 1) // 2
        return queries * self._keys

    def add(self, first: int, weights: torch.Tensor, scores: torch.Tensor) -> None:
        """Add weights and scores [H, queries, K] of queries from position `first` on."""
        self._summary.add(first, weights)
        queries = weights.shape[1]
        seen = weights.new_ones((queries, self._keys), dtype=torch.bool)
        if self._spec.kind == "causal":
            seen = seen.tril(first)
        place = slice(self._pairs(first), self._pairs(first + queries))
        for kept, values in ((self._weights, weights), (self._scores, scores)):
            if kept.size:
                kept[:, place] = values[:, seen].cpu().numpy()

    def result(self) -> AttentionWeights:
        spec = self._spec
        return AttentionWeights(
            stack=STACKS[spec.kind],
            layer=self._number,
            heads=spec.num_heads,
            queries=self._queries,
            keys=self._keys,
            weights=self._weights.tobytes(),
            window=spec.window,
            softcap=spec.softcap,
            scores=self._scores.tobytes(),
            summary=self._summary.summary(),
        )


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys [H, queries, K]. With `sinks` [H] they add up to less than 1."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    own = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat((scores, own), -1), dim=-1)[..., :-1]


def _group(
    first: int, query: torch.Tensor, key: torch.Tensor, seen_keys: torch.Tensor | None
) -> QueryGroup:
    """Return the group of one sequence, whose queries [T, H, D] begin at position `first`.

    `seen_keys` [T] int64 are the last keys that they see; None: their own.
    """
    positions = torch.arange(first, first + len(query), device=query.device)
    return QueryGroup(
        first=0,
        sequences=1,
        count=len(query),
        positions=positions[None],
        tables=positions[None],
        first_keys=None,
        last_keys=positions.new_tensor([len(key) - 1]),
        seen_keys=None if seen_keys is None else seen_keys[None],
    )


def as_bytes(values: torch.Tensor) -> bytes:
    """Return a tensor as bytes of little-endian fp32."""
    return values.float().cpu().numpy().astype("<f4").tobytes()
