"""Instructions of the CPU that kernels are compiled for."""

from __future__ import annotations

from functools import cache

from llvmlite import binding
from numba import config


@cache
def cpu_features() -> str:
    """Return LLVM's list of features of Numba's target CPU, such as "+avx2,+fma,-avx512f"."""
    return config.CPU_FEATURES or binding.get_host_cpu_features().flatten()


def has_avx512() -> bool:
    return _has_feature("avx512f")


def has_avx512_bf16() -> bool:
    """Whether the target CPU multiplies vectors of bf16."""
    return _has_feature("avx512bf16")


def _has_feature(name: str) -> bool:
    return f"+{name}" in cpu_features().split(",")
