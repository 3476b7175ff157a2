"""EmbeddingState: the objects that requests for vectors use besides AppState."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from engine.checkpoint.sentence import SentenceConfig
from server.telemetry.metrics import Metrics
from server.text.pair_template import PairTemplate


@dataclass(frozen=True)
class EmbeddingState:
    sentence: SentenceConfig
    metrics: Metrics
    pairs: PairTemplate | None = None  # of a model with a head


def embedding_state_of(request: Request) -> EmbeddingState:
    state = request.app.state.embedding
    assert isinstance(state, EmbeddingState)
    return state
