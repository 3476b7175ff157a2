"""The optimisations of the kernels in the order in which they are tried, each on top of the last.

One line of STEPS adds one field of `Features`. A field that no line names is found by a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from engine.kernels.triton import chips
from engine.kernels.triton.chips import PLAIN, Features


class Variant(NamedTuple):
    """Its features, and the field that it adds to those of the variant before."""

    name: str
    adds: str
    features: Features


# V0 is what an H200 has had since its first measurement. Early weights and split inputs act on
# folded layers, and prefetching on the fused attention, so they come after these.
STEPS: list[tuple[str, str, Any]] = [
    ("V0", "overlap", True),
    ("V1", "trigger_first", True),
    ("V2", "folded", True),
    ("V3", "early_weights", True),
    ("V4", "split_inputs", True),
    ("V5", "fused_attention", True),
    ("V6", "prefetch_bytes", 24 << 20),
]
# These act on prompts only.
PROMPT_STEPS: list[tuple[str, str, Any]] = [
    ("P1", "longest_first", True),
    ("P2", "rotates_heads_together", True),
]
# Fields without a step, and why.
APART = {"tiles": "section sweep-linear finds them", "rank_sums": "it needs several GPUs"}


def variants(steps: Sequence[tuple[str, str, Any]], first: Features = PLAIN) -> list[Variant]:
    """Return the variants whose field exists, each with all fields before it."""
    found, features = [], first
    for name, field, value in steps:
        if field in Features._fields:
            features = features._replace(**{field: value})
            found.append(Variant(name, field, features))
    return found


def missing() -> list[str]:
    """Return the steps whose field does not exist: they are not measured."""
    steps = [*STEPS, *PROMPT_STEPS]
    return [f"{name} {field}" for name, field, _ in steps if field not in Features._fields]


VARIANTS = variants(STEPS)
PROMPT_VARIANTS = variants(PROMPT_STEPS, VARIANTS[0].features)


@contextmanager
def forced(features: Features) -> Iterator[None]:
    """Let engines that are loaded and run in this context have these features."""
    chips.force(features)
    try:
        yield
    finally:
        chips.force(None)
