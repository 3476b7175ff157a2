"""The quantised encodings of GGUF files, as whole numbers with a scale for each group.

Every encoding is `codes * scale + offset` in fp32, group by group. The layouts are those of ggml's
`ggml-common.h` and `ggml-quants.c` (github.com/ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.ops.quantize import GROUP, Codes, CodesForm, quantize

LOW_HALVES = 0x0F0F0F0F0F0F0F0F


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers in groups: codes [n, groups, size] int8, scales and offsets [n, groups] fp32."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Return the numbers [n, groups * size] in fp32."""
        found = self.codes * self.scales[..., None]
        if self.offsets is not None:
            found += self.offsets[..., None]
        return found.flatten(1)


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Read fp16 numbers: [n, 2 * count] bytes -> [n, count] fp32."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """[n, count] bytes -> [n, 2 * count] numbers below 16: all low halves, then all high ones."""
    words = raw.contiguous().view(torch.int64)  # eight bytes at once take a fifth of the time
    halves = torch.stack((words, words >> 4), -2)
    halves &= LOW_HALVES  # a shift moves the low half of each byte into the byte below it
    return halves.flatten(-2).view(torch.uint8)


def _bits(raw: torch.Tensor) -> torch.Tensor:
    """[n, count] bytes -> [n, 8 * count] bits, the lowest of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (raw[..., None] >> shifts & 1).flatten(-2)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8)


def _q4_0(raw: torch.Tensor) -> Groups:
    codes = _signed(_nibbles(raw[:, 2:])) - 8
    return Groups(codes[:, None], _half(raw[:, :2]))


def _q4_1(raw: torch.Tensor) -> Groups:
    codes = _signed(_nibbles(raw[:, 4:]))
    scales, offsets = _scales_and_offsets(raw)
    return Groups(codes[:, None], scales, offsets)


def _q5_0(raw: torch.Tensor) -> Groups:
    codes = _nibbles(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4
    return Groups(_signed(codes)[:, None] - 16, _half(raw[:, :2]))


def _q5_1(raw: torch.Tensor) -> Groups:
    codes = _nibbles(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4
    scales, offsets = _scales_and_offsets(raw)
    return Groups(_signed(codes)[:, None], scales, offsets)


def _q8_0(raw: torch.Tensor) -> Groups:
    codes = _signed(raw[:, 2:].contiguous())
    return Groups(codes[:, None], _half(raw[:, :2]))


def _scales_and_offsets(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the two fp16 numbers that a block begins with: [n, 1] fp32 each."""
    return _half(raw[:, :2]), _half(raw[:, 2:4])


def _nibbles_of_k(raw: torch.Tensor) -> torch.Tensor:
    """[n, 128] bytes -> [n, 8, 32] numbers: of 32 bytes the low halves, then the high ones."""
    halves = _nibbles(raw.unflatten(1, (4, 32)))
    return halves.unflatten(-1, (2, 32)).flatten(1, 2)


def _scales_of_k(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 12] bytes -> the scales and minimums of eight groups, 6 bits each."""
    first, second, third = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales.float(), minimums.float()


def _q4_k(raw: torch.Tensor) -> Groups:
    """Four parts of 64 numbers: the low halves of 32 bytes, then their high halves."""
    scales, minimums = _scales_of_k(raw[:, 4:16])
    codes = _nibbles_of_k(raw[:, 16:])
    scale, offset = _scales_and_offsets(raw)
    return Groups(_signed(codes), scale * scales, -offset * minimums)


def _q5_k(raw: torch.Tensor) -> Groups:
    """As Q4_K, and group g has its fifth bits in bit g of 32 bytes."""
    scales, minimums = _scales_of_k(raw[:, 4:16])
    codes = _nibbles_of_k(raw[:, 48:])
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    codes = codes | (raw[:, None, 16:48] >> shifts & 1) << 4
    scale, offset = _scales_and_offsets(raw)
    return Groups(_signed(codes), scale * scales, -offset * minimums)


def _q6_k(raw: torch.Tensor) -> Groups:
    """Two halves of 128 numbers: four low bits in 64 bytes, two high bits in 32 bytes."""
    low = _nibbles(raw[:, :128].unflatten(1, (2, 64)))  # numbers 0-31, 32-63, then 64-95, 96-127
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    codes = _signed(low | high.flatten(2) << 4) - 32
    scales = _signed(raw[:, 192:208].contiguous()).float()
    return Groups(codes.reshape(-1, 16, 16), _half(raw[:, 208:]) * scales)


QUANTIZED: dict[str, Callable[[torch.Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# How `regrouped` keeps each encoding.
FORMS = {
    "Q4_0": CodesForm(4, has_offsets=False, is_exact=True),
    "Q4_1": CodesForm(4, has_offsets=True, is_exact=True),
    "Q5_0": CodesForm(8, has_offsets=False, is_exact=True),
    "Q5_1": CodesForm(8, has_offsets=True, is_exact=True),
    "Q8_0": CodesForm(8, has_offsets=False, is_exact=True),
    "Q4_K": CodesForm(4, has_offsets=True),
    "Q5_K": CodesForm(8, has_offsets=True),
    "Q6_K": CodesForm(8, has_offsets=False),
}


def regrouped(groups: Groups, form: CodesForm, outputs: int, inputs: int) -> Codes:
    """Return the numbers of a matrix in a form of FORMS: without loss in groups of 32 numbers.

    Scales and offsets are rounded to fp16, which those of Q4_K and Q5_K may not fit.
    """
    if groups.codes.shape[2] != GROUP:
        found = quantize(groups.dequantize().view(outputs, inputs), "int8")
        assert isinstance(found, Codes)
        return found
    codes, offsets = groups.codes.view(torch.uint8), groups.offsets
    if offsets is None:
        codes = codes + (1 << form.bits - 1)  # wraps around
    return Codes(
        codes.reshape(outputs, inputs),
        groups.scales.half().view(outputs, -1),
        None if offsets is None else offsets.half().view(outputs, -1),
        form.bits,
    )
