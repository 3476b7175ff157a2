"""POST /v1/score: similarity scores of text pairs, as in vLLM."""

from __future__ import annotations

import secrets
import time

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.embeddings import encoder_usage, json_response
from server.api.openai.schemas.embedding import ScoreBody
from server.api.receive import admit_and_read
from server.generation.embedding import Embedding, Vectors, normalised
from server.generation.texts import encode_texts
from server.http.disconnect import cancel_on_disconnect
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/score", openapi_extra=body_schema(ScoreBody))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Compute the cosine similarity of each pair of texts; each text is encoded once."""
    state = state_of(request)
    body = await admit_and_read(request, ScoreBody, "embed")
    truncate = body.truncate_prompt_tokens
    with state.client.reserve():
        first = await encode_texts(state, body.first_texts, truncate, "text_1")
        second = await encode_texts(state, body.second_texts, truncate, "text_2")
    cosines = await similarities(request, first, second, body.priority or 0)
    answer = {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_name(body.model),
        "data": [{"index": i, "object": "score", "score": float(c)} for i, c in enumerate(cosines)],
        "usage": encoder_usage(first + second),
    }
    return json_response(orjson.dumps(answer), body.ignored)


async def similarities(
    request: Request, first: list[list[int]], second: list[list[int]], priority: int
) -> Vectors:
    """Return the cosine [N] of each pair of N token lists; `first` may be one for all."""
    state = state_of(request)
    with Embedding(state, first + second, request.state.arrival, priority) as embedding:
        vectors = await cancel_on_disconnect(request.receive, embedding.collect())
    units = normalised(vectors)
    cosines: Vectors = (units[: len(first)] * units[len(first) :]).sum(1)
    return cosines
