"""The quantised encodings against their definition in NumPy, in PyPI's `gguf`: equal bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.blocks import FORMS, QUANTIZED, regrouped
from engine.checkpoint.gguf.kinds import KINDS

BLOCKS = 300


def random_blocks(name: str) -> np.ndarray:
    """Return blocks of random bytes [BLOCKS, bytes] whose fp16 numbers are finite."""
    kind = next(kind for kind in KINDS.values() if kind.name == name)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (BLOCKS, kind.nbytes), dtype=np.uint8)
    for place in {"Q6_K": [208]}.get(name, [0, 2]):  # fp16 numbers; in some, the second is codes
        raw[:, place + 1] &= 0xBF  # below 2
    return raw


@pytest.mark.parametrize("name", QUANTIZED)
def test_numbers_equal_the_definition(name: str) -> None:
    raw = random_blocks(name)
    due = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = QUANTIZED[name](torch.from_numpy(raw)).dequantize()
    assert np.array_equal(found.numpy().view(np.int32), due.view(np.int32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_numbers_are_near_those_that_were_quantized(name: str) -> None:
    numbers = np.random.default_rng(1).normal(size=(40, 256)).astype(np.float32)
    raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[name])
    kind = next(kind for kind in KINDS.values() if kind.name == name)
    blocks = torch.from_numpy(raw).view(-1, kind.nbytes)
    found = QUANTIZED[name](blocks).dequantize().reshape(numbers.shape).numpy()
    assert np.abs(found - numbers).max() < {"Q8": 0.02, "Q5": 0.2, "Q4": 0.4}[name[:2]]


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_in_groups_of_32_are_the_same_numbers(name: str) -> None:
    """Without loss, but for products of two fp16 numbers, and groups of 16."""
    groups = QUANTIZED[name](torch.from_numpy(random_blocks(name)))
    due = groups.dequantize().view(BLOCKS // 10, -1)
    codes = regrouped(groups, FORMS[name], *due.shape)
    assert codes.form[:2] == FORMS[name][:2]
    assert FORMS[name].is_exact == (name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
    assert int(codes.codes.max()) < 1 << codes.bits
    found = codes.dequantize()
    if FORMS[name].is_exact:
        assert torch.equal(found, due)
    else:
        largest = due.unflatten(1, (-1, 32)).abs().amax(-1) / 200  # half a step of int8, and more
        if codes.offsets is not None:
            largest = 2**-11 * (31 * codes.scales.float().abs() + codes.offsets.float().abs())
        assert ((found - due).abs() <= largest.repeat_interleave(32, 1) + 1e-6).all()
