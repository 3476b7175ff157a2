"""POST /v1/rerank: documents by their similarity to a query, as in the APIs of Jina and Cohere."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.embeddings import json_response
from server.api.openai.schemas.embedding import RerankBody
from server.api.openai.score import similarities
from server.api.receive import admit_and_read
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/rerank", openapi_extra=body_schema(RerankBody, task="embed"))
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Sort documents by the cosine of their vectors with the query's, the most similar first."""
    state = state_of(request)
    body = await admit_and_read(request, RerankBody, "embed")
    sides = ("query", [body.query]), ("documents", body.texts)
    scores, usage = await similarities(request, body, *sides)
    order = (-scores).argsort(kind="stable")[: body.top_n].tolist()

    def entry(index: int) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents is not False:
            found["document"] = {"text": body.texts[index]}
        return found

    answer = {
        "id": f"rerank-{secrets.token_hex(16)}",
        "model": state.model_name(body.model),
        "results": [entry(index) for index in order],
        "usage": usage,
    }
    return json_response(orjson.dumps(answer), body.ignored)
