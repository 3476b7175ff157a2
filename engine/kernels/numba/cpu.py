"""The CPU that kernels are compiled for. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override it."""

from __future__ import annotations

import os
from functools import cache

from llvmlite import binding


@cache
def cpu_name() -> str:
    return os.environ.get("NUMBA_CPU_NAME") or str(binding.get_host_cpu_name())


@cache
def cpu_features() -> str:
    """Return LLVM's list of features of the CPU, such as "+avx2,+fma,-avx512f"."""
    return os.environ.get("NUMBA_CPU_FEATURES") or str(binding.get_host_cpu_features().flatten())


def has_avx512() -> bool:
    return _has_feature("avx512f")


def has_avx512_bf16() -> bool:
    """Whether the target CPU multiplies vectors of bf16."""
    return _has_feature("avx512bf16")


def has_avx512_vnni() -> bool:
    """Whether the target CPU multiplies vectors of 8-bit numbers."""
    return _has_feature("avx512vnni")


def has_amx_bf16() -> bool:
    """Whether the target CPU multiplies tiles of bf16."""
    return _has_feature("amx-tile") and _has_feature("amx-bf16")


def _has_feature(name: str) -> bool:
    return f"+{name}" in cpu_features().split(",")
