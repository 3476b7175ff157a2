"""How much memory the attention weights of a lens take, from the specs of a model's layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.attention.spec import AttentionSpec
from engine.protocol.lens import (
    MAX_LENS_BYTES,
    MAX_LENS_IMAGE_TOKENS,
    MAX_LENS_TOKENS,
    MAX_TOGETHER_BYTES,
)

# Scores of a head, a query and a key that are computed at once: 4 MiB. There are about six arrays
# of that size.
MOST_SCORES = 1 << 20
ARRAYS = 6


def attention_bytes(spec: AttentionSpec, tokens: int) -> int:
    """Return the bytes that a layer's AttentionWeights take for texts of `tokens` tokens."""
    pairs = tokens * (tokens + 1) // 2 if spec.kind == "causal" else tokens * tokens
    return spec.num_heads * pairs * 4 * (1 if spec.softcap is None else 2)


def longest_text(specs: Sequence[AttentionSpec], *, sees: bool) -> int:
    """Return the most tokens of a text whose weights of any one layer fit into MAX_LENS_BYTES.

    `sees` says that texts may show images.
    """
    most = MAX_LENS_IMAGE_TOKENS if sees else MAX_LENS_TOKENS

    def fits(tokens: int) -> bool:
        return all(attention_bytes(spec, tokens) <= MAX_LENS_BYTES for spec in specs)

    return max(tokens for tokens in range(most + 1) if fits(tokens))


def kept_layers(
    stacks: Sequence[Mapping[int, AttentionSpec]], tokens: int, wanted: Collection[int] | None
) -> frozenset[int] | None:
    """Return the layers of each stack whose weights are kept; None if those `wanted` are too large.

    Without `wanted` these are all layers, or none if they are too large together.
    """
    most = MAX_TOGETHER_BYTES if wanted is None else MAX_LENS_BYTES
    layers = frozenset(layer for stack in stacks for layer in stack)
    if wanted is not None:
        layers = frozenset(wanted)
    total = sum(
        attention_bytes(spec, tokens)
        for stack in stacks
        for layer, spec in stack.items()
        if layer in layers
    )
    if total <= most:
        return layers
    return frozenset() if wanted is None else None


def lens_bytes(specs: Sequence[AttentionSpec], *, sees: bool) -> int:
    """Return the most memory that a lens takes: its working memory, and its message twice."""
    if not specs:
        return 0
    longest = longest_text(specs, sees=sees)
    together = min(sum(attention_bytes(spec, longest) for spec in specs), MAX_TOGETHER_BYTES)
    largest = max(attention_bytes(spec, longest) for spec in specs)
    return ARRAYS * 4 * MOST_SCORES + 2 * max(together, largest)
