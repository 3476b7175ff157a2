"""Parts that the writers of quantised checkpoints share: results, fp8 numbers and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Matrix = np.ndarray
Stored = dict[str, torch.Tensor]  # by ending, such as qweight


@dataclass(frozen=True)
class Format:
    settings: dict[str, Any]  # quantization_config
    quantize: Callable[[Matrix], tuple[Stored, Matrix]]  # [outputs, inputs] -> stored, numbers
    keeps_codes: bool = True  # False: the weight is dequantised while it is loaded
    error: float | None = None  # the largest one for normal numbers; None: by the bits of a code


def tensor(array: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
    found = torch.from_numpy(np.ascontiguousarray(array))
    return found if dtype is None else found.to(dtype)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint with one group."""
    weights = {"group_size": None, "block_structure": None, "actorder": None} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    found = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return found | {"quantization_status": "compressed", "config_groups": {"group_0": group}}


def e4m3(code: int) -> float:
    """Return what a byte stands for: a sign, 4 bits of exponent with bias 7, 3 bits of fraction."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
    return -size if sign else size


E4M3 = np.array([e4m3(code) if code & 127 != 127 else np.inf for code in range(256)], np.float32)

EVEN_FIRST = np.argsort(np.arange(256) % 2, kind="stable")  # of two equally near, the even code
