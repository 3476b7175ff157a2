"""Facts of the device the engine runs on: which, how it computes, what memory it has."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.config import BF16_CPU_FEATURES
from engine.errors import ConfigError
from engine.machine import free_memory
from engine.protocol import Uneven

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def select_device(wanted: str) -> torch.device:
    """`auto` takes CUDA where it works; raises ConfigError where `cuda` was asked for in vain."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device. Use --device cpu.")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda")
    return torch.device("cpu")


def select_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the device has instructions for it, else float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    native = gpu_has_bf16() if device.type == "cuda" else cpu_has_bf16()
    return torch.bfloat16 if native else torch.float32


def gpu_has_bf16() -> bool:
    """Whether the GPU multiplies bfloat16; torch emulates it on older ones, our kernels do not."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16."""
    return not BF16_CPU_FEATURES.isdisjoint(_cpu_features())


def cpu_has_amx() -> bool:
    """Whether this CPU has AMX for bfloat16, used or not."""
    return "amx_bf16" in _cpu_features()


def onednn_multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has matmuls of this dtype here: bf16 it has with AVX-512 and newer only."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has matmuls of bf16 here without instructions for it: AVX-512 alone."""
    native = cpu_has_bf16() and _onednn_may_use("BF16", "FP16", "AMX")
    return dtype == torch.bfloat16 and onednn_multiplies(device, dtype) and not native


def emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether bf16 is widened product by product here: many rows take far longer than in fp32."""
    bf16 = device.type == "cpu" and dtype == torch.bfloat16
    return bf16 and not onednn_multiplies(device, dtype)


def multiplies_in_amx(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN takes AMX for this dtype: it then sums in an order that depends on how many
    rows there are."""
    bf16 = device.type == "cpu" and dtype == torch.bfloat16
    return bf16 and _onednn_may_use("AMX") and cpu_has_amx()


def depends_on_rows(
    device: torch.device, dtype: torch.dtype, *, packed: bool, threads: int
) -> Uneven:
    """What makes a row's bits in linear layers depend on how many rows there are, if anything."""
    if device.type != "cpu":
        return None
    if multiplies_in_amx(device, dtype):
        return "amx"
    if not packed:
        return None if emulates(device, dtype) else "unpacked"
    # Torch 2.8 to 2.10 have 3.7.1, in which threads share a long sum; 2.11 has 3.10.2.
    old = dtype == torch.float32 and threads > 1 and _onednn_version() < (3, 10)
    return "onednn" if old else None


def _onednn_version() -> tuple[int, ...]:
    """Of oneDNN, which torch was built with; without it (0,)."""
    found = re.search(r"DNN v(\d+)\.(\d+)", torch.__config__.show())
    return tuple(map(int, found.groups())) if found else (0,)


def _onednn_may_use(*instructions: str) -> bool:
    """Whether ONEDNN_MAX_CPU_ISA, which names the best instructions it may use, names these."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    return allowed in ("", "ALL", "DEFAULT") or any(word in allowed for word in instructions)


@cache
def _cpu_features() -> set[str]:
    """Every word of /proc/cpuinfo; empty where there is none."""
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return set()


def available_memory(device: torch.device) -> int:
    """Bytes that may still be taken: of the GPU, or of the machine within the container's limit."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def total_memory(device: torch.device) -> int | None:
    """Bytes a GPU has in all; None for a CPU, whose memory is everybody's."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def to_device(
    columns: Sequence[npt.ArrayLike],
    device: torch.device,
    dtype: type[np.generic] = np.int64,
) -> tuple[torch.Tensor, ...]:
    """Numbers from the host, as one tensor each, in a single copy that the host does not wait for.

    On CUDA it goes through a fresh pinned buffer: nothing is written while a copy reads it.
    """
    arrays = [np.asarray(column, dtype) for column in columns]
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return packed.split([len(array) for array in arrays])


class HostCopy:
    """Tensors on their way to the host, as they were when the copy was asked for.

    On CUDA they arrive in fresh pinned buffers when the device gets there; `wait` is the one place
    where the host waits for it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._tensors = [tensor.clone() for tensor in tensors]
            return
        self._tensors = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
