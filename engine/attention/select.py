"""Select the attention backend of a model: the first that supports all its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.spec import AttentionSpec
from engine.attention.torch.backend import TorchBackend
from engine.errors import ConfigError

CANDIDATES = {"cuda": ("triton", "torch"), "cpu": ("numba", "torch")}  # per device, fastest first


def select_backend(
    specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, wanted: str = "auto"
) -> tuple[AttentionBackend, str]:
    """Return a backend and its description: its name, and why faster ones were not selected.

    Raises ConfigError with the reasons of every candidate if none supports all layers.
    """
    reasons: list[str] = []
    for name in CANDIDATES[device.type] if wanted == "auto" else (wanted,):
        backend = _load(name, device)
        if isinstance(backend, str):
            refusals = [backend]
        else:
            refusals = _refusals(backend, specs, dtype)
            if not refusals:
                return backend, f"{name} ({'; '.join(reasons)})" if reasons else name
        reasons.append(f"not {name}: {', '.join(refusals)}")
    hint = "" if wanted == "auto" else " Use --attention-backend auto."
    raise ConfigError(f"No attention backend supports this model: {'; '.join(reasons)}.{hint}")


def kernels_backend(
    specs: Sequence[AttentionSpec],
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    wanted: str,
) -> str:
    """Return the name of the backend whose kernels compute the layers around attention.

    It is `backend`, except for causal layers on a CPU that Numba's attention does not support: its
    other kernels do not depend on them.
    """
    is_decoder = all(spec.kind == "causal" for spec in specs)
    if backend.name != "torch" or wanted != "auto" or device.type != "cpu" or not is_decoder:
        return backend.name
    numba = _load("numba", device)
    own_values = [replace(spec, value_dim=None) for spec in specs]
    if isinstance(numba, str) or _refusals(numba, own_values, dtype):
        return backend.name
    return numba.name


def _refusals(
    backend: AttentionBackend, specs: Sequence[AttentionSpec], dtype: torch.dtype
) -> list[str]:
    reasons = {backend.refuses(spec, dtype) for spec in specs}
    return sorted(reason for reason in reasons if reason)


def _load(name: str, device: torch.device) -> AttentionBackend | str:
    """Return the backend, or the reason why it cannot be loaded."""
    if name == "torch":
        return TorchBackend()
    try:
        if name == "numba":
            from engine.attention.numba import NumbaBackend

            return NumbaBackend(device)
        from engine.attention.triton import TritonBackend

        return TritonBackend(device)
    except ModuleNotFoundError as error:
        package = {"numba": "numba", "triton": "penstock[gpu]"}[name]
        return f"it needs {error.name}, which is not installed: pip install '{package}'"
    except (ImportError, OSError) as error:
        # For example a numpy that Numba does not support, or no address space left for its library.
        return f"it cannot be imported: {error}"
