"""EmbeddingState: the objects that requests for vectors use besides AppState."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from engine.checkpoint.sentence import SentenceConfig
from server.telemetry.metrics import Metrics


@dataclass(frozen=True)
class EmbeddingState:
    sentence: SentenceConfig
    metrics: Metrics


def embedding_state_of(request: Request) -> EmbeddingState:
    state = request.app.state.embedding
    assert isinstance(state, EmbeddingState)
    return state
