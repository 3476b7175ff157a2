"""GET /info, as in text-embeddings-inference (router/src/lib.rs, `Info`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from engine.checkpoint.sentence import SentenceConfig
from server.api.openai.schemas.embedding import MAX_TEXTS
from server.generation.embedding_state import embedding_state_of
from server.state import VERSION, state_of

router = APIRouter()
# The names of poolings that differ.
POOLINGS = {"lasttoken": "last_token"}


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """Return the kind of the encoder and its limits.

    `version` is Penstock's. Texts are cut only if a request says so, hence no `auto_truncate`.
    """
    state = state_of(request)
    if state.task == "generate":
        state.check_task("embed")  # raises
    facts = state.loaded()
    return {
        "model_id": state.names[0],
        "model_sha": None,
        "model_dtype": facts.dtype,
        "model_type": _model_type(embedding_state_of(request).sentence),
        "max_input_length": state.max_length(),
        "max_batch_tokens": facts.max_num_encoder_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "version": VERSION,
    }


def _model_type(sentence: SentenceConfig) -> dict[str, Any]:
    head = sentence.head
    if head is None:
        modes = [POOLINGS.get(mode, mode) for mode in sentence.pooler.modes]
        return {"embedding": {"pooling": "+".join(modes)}}
    kind = "reranker" if len(head.labels) == 1 else "classifier"
    names = {str(index): label for index, label in enumerate(head.labels)}
    ids = {label: index for index, label in enumerate(head.labels)}
    return {kind: {"id2label": names, "label2id": ids}}
