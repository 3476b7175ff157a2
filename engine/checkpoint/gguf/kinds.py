"""The types of tensors in GGUF files, by the numbers that ggml gives them (`enum ggml_type`)."""

from __future__ import annotations

from typing import NamedTuple


class TensorKind(NamedTuple):
    """An encoding of tensors: `block` numbers are stored together in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    30: TensorKind("BF16", 1, 2),
}
# Types that are known by name only. llama.cpp has removed those in the second list.
OTHERS = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
SERVED = ", ".join(sorted(kind.name for kind in KINDS.values()))


def why_not_served(number: int) -> str:
    """Return what a user should know of a type that is not in KINDS."""
    if number in REMOVED:
        return f"{REMOVED[number]}, which llama.cpp has removed"
    if number in OTHERS:
        return f"{OTHERS[number]}, which is not served yet"
    return f"number {number}, which is unknown"
