"""POST /v2/rerank."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.cohere.schemas import RerankBody
from server.api.openai.pair_scores import pair_scores
from server.api.openai.vectors import json_response
from server.api.receive import admit_and_read
from server.generation.pairs import PairLimits, Side
from server.http.openapi import body_schema

router = APIRouter()


@router.post("/v2/rerank", openapi_extra=body_schema(RerankBody, task="score"))
async def rerank(request: Request) -> Response:
    """Sort documents by their scores with the query, the highest first, as in Cohere's API."""
    body = await admit_and_read(request, RerankBody, "score")
    scores, usage = await pair_scores(
        request,
        body,
        Side("query", [body.query], "query"),
        Side("documents", body.texts, "document"),
        PairLimits(second=body.max_tokens_per_doc),
    )
    order = (-scores).argsort(kind="stable")[: body.top_n].tolist()
    billed = {"search_units": 1, "input_tokens": usage["prompt_tokens"]}
    answer: dict[str, Any] = {
        "id": secrets.token_hex(16),
        "results": [{"index": i, "relevance_score": float(scores[i])} for i in order],
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
    }
    return json_response(orjson.dumps(answer), body.ignored)
