"""POST /v1/score: similarity scores of text pairs, as in vLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import ScoreBody, TextsBody
from server.api.openai.vectors import embed_tokens, json_response
from server.api.receive import admit_and_read
from server.generation.embedding import Vectors, normalised
from server.generation.embedding_state import embedding_state_of
from server.generation.texts import encode_texts
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()
Side = tuple[str, Sequence[str]]  # the name of a field, and its texts


@router.post("/v1/score", openapi_extra=body_schema(ScoreBody, task="embed"))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Compute the cosine similarity of each pair of texts; each text is encoded once."""
    state = state_of(request)
    body = await admit_and_read(request, ScoreBody, "embed")
    sides = ("text_1", body.first_texts), ("text_2", body.second_texts)
    cosines, usage = await similarities(request, body, *sides)
    answer = {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_name(body.model),
        "data": [{"index": i, "object": "score", "score": float(c)} for i, c in enumerate(cosines)],
        "usage": usage,
    }
    return json_response(orjson.dumps(answer), body.ignored)


async def similarities(
    request: Request, body: TextsBody, one: Side, other: Side
) -> tuple[Vectors, dict[str, int]]:
    """Return the cosine [N] of each pair of texts, and the usage; `one` may be one text for all."""
    state, pooling = state_of(request), embedding_state_of(request).pooling
    with state.client.reserve(request.state.tenant):
        first, second = [
            await encode_texts(
                state, pooling, texts, body.truncate_prompt_tokens, name, keep_end=body.keeps_end
            )
            for name, texts in (one, other)
        ]
    vectors, usage = await embed_tokens(request, body, first + second)
    units = normalised(vectors)
    cosines: Vectors = (units[: len(first)] * units[len(first) :]).sum(1)
    return cosines, usage
