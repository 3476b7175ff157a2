"""Which backend serves a model: the first that honours every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.spec import AttentionSpec
from engine.attention.torch_backend import TorchBackend
from engine.errors import ConfigError


def select_backend(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> AttentionBackend:
    """Raises ConfigError with every backend's reasons where none serves all layers."""
    candidates: list[AttentionBackend] = [TorchBackend()]
    reasons = []
    for backend in candidates:
        refused = {r for spec in specs if (r := backend.refuses(spec, dtype))}
        if not refused:
            return backend
        reasons.append(f"{backend.name}: {'; '.join(sorted(refused))}")
    raise ConfigError("No attention backend serves this model. " + " | ".join(reasons))
