"""Properties of the device that the engine runs on: type, arithmetic and memory."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

from engine.device.limits import BF16_CPU_FEATURES, free_memory
from engine.errors import ConfigError
from engine.protocol.ready import BatchVariance

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def select_device(wanted: str) -> torch.device:
    """Return the device for --device; `auto` is CUDA if available.

    Raises ConfigError if `cuda` is wanted and torch finds no CUDA device.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device. Use --device cpu.")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda")
    return torch.device("cpu")


def select_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype for --dtype; `auto` is bfloat16 if the device has instructions for it."""
    if wanted != "auto":
        return DTYPES[wanted]
    native = gpu_has_bf16() if device.type == "cuda" else cpu_has_bf16()
    return torch.bfloat16 if native else torch.float32


def gpu_has_bf16() -> bool:
    """Whether the GPU multiplies bfloat16. On older GPUs torch emulates it; our kernels do not."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16."""
    return not BF16_CPU_FEATURES.isdisjoint(_cpu_features())


def cpu_has_amx() -> bool:
    """Whether this CPU has AMX for bfloat16, even if oneDNN may not use it."""
    return "amx_bf16" in _cpu_features()


def onednn_has_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has matmuls of this dtype here. For bf16 it needs AVX-512 or newer."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_emulates_bf16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN computes bf16 matmuls here without bf16 instructions, on plain AVX-512."""
    native = cpu_has_bf16() and onednn_may_use("BF16", "FP16", "AMX")
    return dtype == torch.bfloat16 and onednn_has_matmul(device, dtype) and not native


def emulates_bf16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether bf16 is widened for each product here, so that many rows are far slower than fp32."""
    bf16 = device.type == "cpu" and dtype == torch.bfloat16
    return bf16 and not onednn_has_matmul(device, dtype)


def sum_in_fp32() -> None:
    """Let cuBLAS add the parts of a product in fp32. By default it may add them in 16 bits."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def forbid_amx() -> None:
    """Let oneDNN compute without AMX. Call it before oneDNN's first use, which reads the limit."""
    if onednn_may_use("AMX"):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


def uses_amx(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN uses AMX for this dtype. Its order of summation depends on the row count."""
    bf16 = device.type == "cpu" and dtype == torch.bfloat16
    return bf16 and onednn_may_use("AMX") and cpu_has_amx()


def fuses_chunks(device: torch.device) -> bool:
    """Whether torch's fused attention computes prompt chunks in bf16, for the speed of AMX.

    A token then has other bits in a chunk than as a decode. `forbid_amx` ends it.
    """
    return uses_amx(device, torch.bfloat16)


def batch_variance_of(
    device: torch.device, dtype: torch.dtype, *, packed: bool, threads: int
) -> BatchVariance:
    """Return why a row's bits in linear layers depend on the row count; None if they do not."""
    if device.type != "cpu":
        return "gpu"
    if uses_amx(device, dtype):
        return "amx"
    if not packed:
        return None if emulates_bf16(device, dtype) else "unpacked"
    # oneDNN 3.7.1 (torch 2.8 to 2.10) splits long sums among threads; 3.10.2 (2.11) does not.
    old = dtype == torch.float32 and threads > 1 and _onednn_version() < (3, 10)
    return "onednn" if old else None


def _onednn_version() -> tuple[int, ...]:
    """Return the version of oneDNN that torch was built with; (0,) if built without it."""
    found = re.search(r"DNN v(\d+)\.(\d+)", torch.__config__.show())
    return tuple(map(int, found.groups())) if found else (0,)


def onednn_may_use(*instructions: str) -> bool:
    """Whether ONEDNN_MAX_CPU_ISA, the best instruction set oneDNN may use, allows any of these."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    return allowed in ("", "ALL", "DEFAULT") or any(word in allowed for word in instructions)


@cache
def _cpu_features() -> set[str]:
    """Return every word of /proc/cpuinfo; empty if it cannot be read."""
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return set()


def available_memory(device: torch.device) -> int:
    """Return the free bytes of the GPU, or of the machine within its container's limit."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def total_memory(device: torch.device) -> int | None:
    """Return the total bytes of a GPU; None for a CPU, whose memory other programs share."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
