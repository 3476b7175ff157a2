"""EmbeddingState: the objects that requests for vectors use besides AppState."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from server.telemetry.metrics import Metrics
from server.text.pooling import PoolingConfig


@dataclass(frozen=True)
class EmbeddingState:
    pooling: PoolingConfig
    metrics: Metrics


def embedding_state_of(request: Request) -> EmbeddingState:
    state = request.app.state.embedding
    assert isinstance(state, EmbeddingState)
    return state
