"""The quantised encodings of GGUF files, as whole numbers with a scale for each group.

Every encoding is `codes * scale + offset` in fp32, group by group. The layouts are those of ggml's
`ggml-common.h` and `ggml-quants.c` (github.com/ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.checkpoint.gguf.few_bits import q1_0, q2_0, q2_k, q3_k, q3_k_in_32, tq1_0, tq2_0
from engine.checkpoint.gguf.groups import Groups, bits, half, nibbles, scales_and_offsets, signed
from engine.checkpoint.gguf.lattices import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from engine.checkpoint.gguf.tables import iq4_nl, iq4_xs, mxfp4, nvfp4
from engine.ops.quantize import GROUP, Codes, CodesForm, quantize


def _q4_0(raw: torch.Tensor) -> Groups:
    codes = signed(nibbles(raw[:, 2:])) - 8
    return Groups(codes[:, None], half(raw[:, :2]))


def _q4_1(raw: torch.Tensor) -> Groups:
    codes = signed(nibbles(raw[:, 4:]))
    scales, offsets = scales_and_offsets(raw)
    return Groups(codes[:, None], scales, offsets)


def _q5_0(raw: torch.Tensor) -> Groups:
    codes = nibbles(raw[:, 6:]) | bits(raw[:, 2:6]) << 4
    return Groups(signed(codes)[:, None] - 16, half(raw[:, :2]))


def _q5_1(raw: torch.Tensor) -> Groups:
    codes = nibbles(raw[:, 8:]) | bits(raw[:, 4:8]) << 4
    scales, offsets = scales_and_offsets(raw)
    return Groups(signed(codes)[:, None], scales, offsets)


def _q8_0(raw: torch.Tensor) -> Groups:
    codes = signed(raw[:, 2:].contiguous())
    return Groups(codes[:, None], half(raw[:, :2]))


def _nibbles_of_k(raw: torch.Tensor) -> torch.Tensor:
    """[n, 128] bytes -> [n, 8, 32] numbers: of 32 bytes the low halves, then the high ones."""
    halves = nibbles(raw.unflatten(1, (4, 32)))
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
    scale, offset = scales_and_offsets(raw)
    return Groups(signed(codes), scale * scales, -offset * minimums)


def _q5_k(raw: torch.Tensor) -> Groups:
    """As Q4_K, and group g has its fifth bits in bit g of 32 bytes."""
    scales, minimums = _scales_of_k(raw[:, 4:16])
    codes = _nibbles_of_k(raw[:, 48:])
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    codes = codes | (raw[:, None, 16:48] >> shifts & 1) << 4
    scale, offset = scales_and_offsets(raw)
    return Groups(signed(codes), scale * scales, -offset * minimums)


def _q6_k(raw: torch.Tensor) -> Groups:
    """Two halves of 128 numbers: four low bits in 64 bytes, two high bits in 32 bytes."""
    low = nibbles(raw[:, :128].unflatten(1, (2, 64)))  # numbers 0-31, 32-63, then 64-95, 96-127
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    codes = signed(low | high.flatten(2) << 4) - 32
    scales = signed(raw[:, 192:208].contiguous()).float()
    return Groups(codes.reshape(-1, 16, 16), half(raw[:, 208:]) * scales)


Decoder = Callable[[torch.Tensor], Groups]
QUANTIZED: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q1_0": q1_0,
    "Q2_0": q2_0,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
}
# The same numbers in other groups, to keep their codes.
KEPT: dict[str, Decoder] = {"Q3_K": q3_k_in_32}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# How `regrouped` keeps encodings. The others have groups of 16 numbers and are decoded: rounding
# them again to 8 bits raised the perplexity of SmolLM2 in IQ2_XS by 7 %.
FORMS = {
    "Q4_0": CodesForm(4, has_offsets=False, is_exact=True),
    "Q4_1": CodesForm(4, has_offsets=True, is_exact=True),
    "Q5_0": CodesForm(8, has_offsets=False, is_exact=True),
    "Q5_1": CodesForm(8, has_offsets=True, is_exact=True),
    "Q8_0": CodesForm(8, has_offsets=False, is_exact=True),
    "Q4_K": CodesForm(4, has_offsets=True),
    "Q5_K": CodesForm(8, has_offsets=True),
    "Q6_K": CodesForm(8, has_offsets=False),
    "Q3_K": CodesForm(8, has_offsets=False, is_exact=True),
    "Q1_0": CodesForm(4, has_offsets=False, is_exact=True),
    "Q2_0": CodesForm(4, has_offsets=False, is_exact=True),
    "TQ1_0": CodesForm(4, has_offsets=False, is_exact=True),
    "TQ2_0": CodesForm(4, has_offsets=False, is_exact=True),
    "IQ1_S": CodesForm(8, has_offsets=False),
    "IQ2_XXS": CodesForm(8, has_offsets=False),
    "IQ3_XXS": CodesForm(8, has_offsets=False),
    "IQ3_S": CodesForm(8, has_offsets=False),
    "IQ4_NL": CodesForm(8, has_offsets=False, is_exact=True),
    "IQ4_XS": CodesForm(8, has_offsets=False),
    "MXFP4": CodesForm(8, has_offsets=False),
}


def regrouped(groups: Groups, form: CodesForm, outputs: int, inputs: int) -> Codes:
    """Return the numbers of a matrix in a form of FORMS, in groups of 32 numbers.

    Groups of 32 and more keep their codes; scales and offsets are rounded to fp16, which products
    may not fit. Groups of 16 are rounded to int8.
    """
    size = groups.codes.shape[2]
    if size % GROUP:
        found = quantize(groups.dequantize().view(outputs, inputs), "int8")
        assert isinstance(found, Codes)
        return found
    codes, offsets = groups.codes.view(torch.uint8), groups.offsets
    if offsets is None:
        codes = codes + (1 << form.bits - 1)  # wraps around
    repeats = size // GROUP
    return Codes(
        codes.reshape(outputs, inputs),
        groups.scales.half().repeat_interleave(repeats, 1).view(outputs, -1),
        None if offsets is None else offsets.half().repeat_interleave(repeats, 1).view(outputs, -1),
        form.bits,
    )
