"""`system_fingerprint`: equal where the same request, with its seed, has the same tokens."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from engine.protocol.ready import Ready
from server.adapters import ServedAdapter


def fingerprint_settings(
    version: str, info: Ready, adapter: ServedAdapter | None = None
) -> dict[str, str]:
    """Return what the tokens of an answer depend on, besides the request, by name.

    Drafts, graphs, prefix reuse and preemption are left out: answers are the same with and without.
    """
    settings = {
        "version": version,
        "architecture": info.architecture,
        "parameters": str(info.parameters),
        "weights": info.weights,
        "dtype": info.dtype,
        "quantization": info.quantization or "none",
        "kv_cache_dtype": info.kv_cache_dtype or "auto",
        "device": info.device,
        "attention_backend": info.attention_backend,
        "block_size": str(info.block_size),  # a softmax is summed block by block
        "tensor_parallel_size": str(info.tensor_parallel_size),
        "batch_invariant": "on" if info.batch_variance is None else f"off ({info.batch_variance})",
    }
    if info.kernel_features is not None:  # some round at another place
        settings["kernel_features"] = ", ".join(info.kernel_features) or "none"
    if adapter is not None:
        settings["adapter"] = f"{adapter.name} ({adapter.path})"
    return settings


def fingerprint_of(settings: Mapping[str, str]) -> str:
    """Return OpenAI's `system_fingerprint` for these settings."""
    return f"fp_{zlib.crc32(repr(sorted(settings.items())).encode()):08x}"


def model_fingerprint(version: str, info: Ready, adapter: ServedAdapter | None = None) -> str:
    """Return OpenAI's `system_fingerprint` for a model, or for one of its adapters."""
    return fingerprint_of(fingerprint_settings(version, info, adapter))
