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
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    16: TensorKind("IQ2_XXS", 256, 66),
    17: TensorKind("IQ2_XS", 256, 74),
    18: TensorKind("IQ3_XXS", 256, 98),
    19: TensorKind("IQ1_S", 256, 50),
    20: TensorKind("IQ4_NL", 32, 18),
    21: TensorKind("IQ3_S", 256, 110),
    22: TensorKind("IQ2_S", 256, 82),
    23: TensorKind("IQ4_XS", 256, 136),
    29: TensorKind("IQ1_M", 256, 56),
    30: TensorKind("BF16", 1, 2),
    34: TensorKind("TQ1_0", 256, 54),
    35: TensorKind("TQ2_0", 256, 66),
    39: TensorKind("MXFP4", 32, 17),
    40: TensorKind("NVFP4", 64, 36),
    41: TensorKind("Q1_0", 128, 18),
    42: TensorKind("Q2_0", 64, 18),
}
# Types that no model's weights have: of intermediate sums, whole numbers and fp64. llama.cpp has
# removed those in the second list.
OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
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
        return f"{OTHERS[number]}, which is not served"
    return f"number {number}, which is unknown"
