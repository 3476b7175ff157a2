"""The optimisations that each GPU gets: one frozen table, each line with its measurement.

A chip that has no line gets kernels that start one after another, which is right everywhere.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """A GPU by what decides how fast a kernel is on it."""

    capability: tuple[int, int]
    num_sms: int  # streaming multiprocessors
    l2_bytes: int


class LinearTile(NamedTuple):
    """The tile of a program: outputs, inputs read at a time, tiles in flight, and warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int


class ShapeTile(NamedTuple):
    """The tile of a weight [outputs, inputs] for up to 16 rows."""

    outputs: int
    inputs: int
    tile: LinearTile


class Features(NamedTuple):
    """The optimisations that are on. Without any, each kernel waits for the one before."""

    overlap: bool = False  # programmatic dependent launch (engine/kernels/triton/overlap.py)
    trigger_first: bool = False  # the next kernel is let start before this one waits
    folded: bool = False  # norms, sums and activations in linear layers (folded_linear.py)
    early_weights: bool = False  # those layers read weights into registers before they wait
    split_inputs: bool = False  # several programs share the inputs of an output, if outputs are few
    tiles: tuple[ShapeTile, ...] = ()  # of folded linear layers; others have the default
    fused_attention: bool = False  # one launch from projection to result (fused_decode.py)
    prefetch_bytes: int = 0  # of the next weights that idle programs of attention fetch into L2
    longest_first: bool = False  # order of the tiles of extend_attention.py
    rotates_heads_together: bool = False  # several heads a program (rotary.py)
    rank_sums: bool = False  # small sums of ranks in one launch (engine/kernels/triton/rank_sum.py)


PLAIN = Features()
H200 = Chip((9, 0), 132, 60 << 20)  # as torch prints its properties; an H100 SXM has 50 MB
CHIPS: dict[Chip, Features] = {
    H200: Features(overlap=True),
}


class Measurement(NamedTuple):
    """A row of a committed benchmark file, measured with the optimisation on."""

    file: str  # from the root of the repository
    row: str  # its `what`


# The proof of each optimisation of CHIPS; `make gpu-ablations` prints lines for both tables.
# The run without `overlap` was not kept: docs/gpu.md has its difference.
MEASURED: dict[Chip, dict[str, Measurement]] = {
    H200: {"overlap": Measurement("docs/benchmarks/gpu-h200.json", "qwen3-0.6b, decode, batch 1")},
}
_forced: list[Features] = []


@cache
def chip_of(device: torch.device) -> Chip | None:
    """Return the chip of a GPU, and None for another device."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    return Chip((facts.major, facts.minor), facts.multi_processor_count, facts.L2_cache_size)


def active(features: Features) -> tuple[str, ...]:
    """Return the names of the optimisations that are on."""
    return tuple(
        name
        for name, value, plain in zip(Features._fields, features, PLAIN, strict=True)
        if value != plain
    )


def features_of(device: torch.device) -> Features:
    """Return what is on for kernels on `device`."""
    if _forced:
        return _forced[-1]
    chip = chip_of(device)
    return PLAIN if chip is None else CHIPS.get(chip, PLAIN)


def force(features: Features | None) -> None:
    """Use these on every chip of this process; None goes back to the table."""
    _forced[:] = [] if features is None else [features]
