"""Select the attention backend of a model: the first that supports all its layers."""

from __future__ import annotations

from collections.abc import Sequence

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
