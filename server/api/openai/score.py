"""POST /v1/score: scores of text pairs, as in vLLM."""

from __future__ import annotations

import secrets
import time

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.pair_scores import pair_scores
from server.api.openai.schemas.embedding import ScoreBody
from server.api.openai.vectors import json_response
from server.api.receive import admit_and_read
from server.generation.pairs import PairLimits, Side
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/score", openapi_extra=body_schema(ScoreBody, task="score"))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Score each pair of texts: by a cross-encoder, or by the similarity of their vectors."""
    state = state_of(request)
    body = await admit_and_read(request, ScoreBody, "score")
    scores, usage = await pair_scores(
        request,
        body,
        Side("text_1", body.first_texts),
        Side("text_2", body.second_texts),
        PairLimits(body.truncate_prompt_tokens, keep_end=body.keeps_end),
        body.raw_field,
    )
    answer = {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_name(body.model),
        "data": [{"index": i, "object": "score", "score": float(s)} for i, s in enumerate(scores)],
        "usage": usage,
    }
    return json_response(orjson.dumps(answer), body.ignored)
