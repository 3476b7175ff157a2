"""The quantised encodings against their definition in NumPy, in PyPI's `gguf`: equal bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.blocks import FORMS, KEPT, QUANTIZED, regrouped
from engine.checkpoint.gguf.kinds import KINDS

BLOCKS = 320
TINY = 2**-18  # what 128 steps lose if their scale is too small for a normal fp16 number
# The bytes at which fp16 numbers begin. In some encodings the second one is codes.
HALVES = {
    "IQ1_M": [],
    "MXFP4": [],
    "NVFP4": [],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
}


def random_blocks(name: str) -> np.ndarray:
    """Return blocks of random bytes [BLOCKS, bytes] whose fp16 numbers are finite."""
    kind = next(kind for kind in KINDS.values() if kind.name == name)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (BLOCKS, kind.nbytes), dtype=np.uint8)
    for place in HALVES.get(name, [0, 2]):
        raw[:, place + 1] &= 0xBF  # below 2
    if name == "IQ1_M":
        raw[:, 55] &= 0xBF  # the highest bits of its scale
    elif name == "MXFP4":
        raw[:, 0] = np.arange(BLOCKS) % 252  # more is beyond fp32
    elif name == "NVFP4":
        raw[:64, :4] = np.arange(256).reshape(64, 4)
    return raw


def definition(name: str, raw: np.ndarray) -> np.ndarray:
    """Return the numbers of blocks. Of two types, the pinned library has no definition."""
    if name not in ("Q1_0", "Q2_0"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    scales = raw[:, :2].copy().view(np.float16).astype(np.float32)
    if name == "Q1_0":  # dequantize_row_q1_0 and ..._q2_0 in ggml-quants.c
        bits = np.unpackbits(raw[:, 2:], axis=1, bitorder="little")
        return np.where(bits, scales, -scales)
    codes = raw[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return (codes.reshape(-1, 64).astype(np.float32) - 1) * scales


@pytest.mark.parametrize("name", QUANTIZED)
def test_numbers_equal_the_definition(name: str) -> None:
    raw = random_blocks(name)
    due = definition(name, raw)
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


# Encodings whose kept codes stand for the same numbers.
EXACT = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K"),
    *("Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ4_NL"),
)


@pytest.mark.parametrize("name", FORMS)
def test_codes_in_groups_of_32_are_the_same_numbers(name: str) -> None:
    """Without loss, but for scales that are products, and the groups of 16 of Q6_K."""
    raw = torch.from_numpy(random_blocks(name))
    if name == "MXFP4":
        raw[:, 0] = 104 + raw[:, 0] % 39  # scales that fp16 holds
    due = QUANTIZED[name](raw).dequantize().view(BLOCKS // 10, -1)
    groups = KEPT.get(name, QUANTIZED[name])(raw)
    codes = regrouped(groups, FORMS[name], *due.shape)
    assert codes.form[:2] == FORMS[name][:2]
    assert FORMS[name].is_exact == (name in EXACT)
    assert int(codes.codes.max()) < 1 << codes.bits
    found = codes.dequantize()
    if FORMS[name].is_exact:
        assert torch.equal(found, due)
    else:
        largest = due.unflatten(1, (-1, 32)).abs().amax(-1) / 200  # half a step of int8, and more
        if codes.offsets is not None:
            largest = 2**-11 * (31 * codes.scales.float().abs() + codes.offsets.float().abs())
        assert ((found - due).abs() <= largest.repeat_interleave(32, 1) + TINY).all()
