"""EmbeddingState: the objects that requests for vectors use besides AppState."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from engine.checkpoint.sentence import SentenceConfig
from server.telemetry.metrics import Metrics
from server.text.chat_pair import ChatPair, read_chat_pair
from server.text.chat_template import ChatTemplate
from server.text.pair_template import PairTemplate, read_pair_template
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EmbeddingState:
    sentence: SentenceConfig
    metrics: Metrics
    pairs: PairTemplate | ChatPair | None = None  # of a model with a head


def pairs_of(
    tokenizer: Tokenizer, template: ChatTemplate | None, folder: Path, sentence: SentenceConfig
) -> PairTemplate | ChatPair | None:
    """Return how a model with a head reads a pair: by a chat template, else by the tokenizer's.

    Raises ConfigError if the template is not supported.
    """
    head = sentence.head
    if head is None:
        return None
    if template is not None and head.reads_chats:
        return read_chat_pair(template, folder, sentence.standard_prompt, head.chat_options)
    return read_pair_template(tokenizer, folder)


def embedding_state_of(request: Request) -> EmbeddingState:
    state = request.app.state.embedding
    assert isinstance(state, EmbeddingState)
    return state
