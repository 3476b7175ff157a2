"""POST /v1/rerank: documents by their scores with a query, as in the APIs of Jina and Cohere."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.pair_scores import pair_scores
from server.api.openai.schemas.embedding import RerankBody, tokens_kept
from server.api.openai.vectors import json_response
from server.api.receive import admit_and_read
from server.generation.pairs import PairLimits, Side
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/rerank", openapi_extra=body_schema(RerankBody, task="score"))
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Sort documents by their scores with the query, the highest first."""
    state = state_of(request)
    body = await admit_and_read(request, RerankBody, "score")
    name = "documents" if body.texts is None else "texts"
    scores, usage = await pair_scores(
        request,
        body,
        Side("query", [body.query], "query"),
        Side(name, body.candidates, "document"),
        PairLimits(
            tokens_kept(body, body.truncate), body.max_tokens_per_doc, keep_end=body.keeps_end
        ),
        body.raw_field,
    )
    order = (-scores).argsort(kind="stable")[: body.top_n].tolist()

    if body.texts is not None:
        listed = [_scored_text(body, index, float(scores[index])) for index in order]
        return json_response(orjson.dumps(listed), body.ignored)

    def entry(index: int) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents is not False:
            found["document"] = {"text": body.candidates[index]}
        return found

    answer = {
        "id": f"rerank-{secrets.token_hex(16)}",
        "model": state.model_name(body.model),
        "results": [entry(index) for index in order],
        "usage": usage,
    }
    return json_response(orjson.dumps(answer), body.ignored)


def _scored_text(body: RerankBody, index: int, score: float) -> dict[str, Any]:
    """Return an entry of the answer of text-embeddings-inference."""
    entry: dict[str, Any] = {"index": index, "score": score}
    if body.return_documents:
        entry["text"] = body.candidates[index]
    return entry
