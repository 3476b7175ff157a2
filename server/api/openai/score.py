"""POST /v1/score: similarity scores of text pairs, as in vLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import ScoreBody, TextsBody
from server.api.openai.vectors import embed_tokens, json_response
from server.api.receive import admit_and_read
from server.generation.embedding import Vectors, finished, similarities
from server.generation.embedding_state import embedding_state_of
from server.generation.texts import encode_texts
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


class Side(NamedTuple):
    """One side of the pairs."""

    field: str  # of the request
    texts: Sequence[str]
    prompt: str | None = None  # the name of the checkpoint's prompt; None: the default one


@router.post("/v1/score", openapi_extra=body_schema(ScoreBody, task="embed"))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Compute the similarity of each pair of texts; each text is encoded once."""
    state = state_of(request)
    body = await admit_and_read(request, ScoreBody, "embed")
    sides = Side("text_1", body.first_texts), Side("text_2", body.second_texts)
    scores, usage = await pair_scores(request, body, *sides)
    answer = {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_name(body.model),
        "data": [{"index": i, "object": "score", "score": float(s)} for i, s in enumerate(scores)],
        "usage": usage,
    }
    return json_response(orjson.dumps(answer), body.ignored)


async def pair_scores(
    request: Request, body: TextsBody, one: Side, other: Side
) -> tuple[Vectors, dict[str, int]]:
    """Return the similarity [N] of each pair of texts, and the usage; `one` may be one for all."""
    state, sentence = state_of(request), embedding_state_of(request).sentence
    with state.client.reserve(request.state.tenant):
        first, second = [
            await encode_texts(
                state,
                sentence,
                side.texts,
                body.truncate_prompt_tokens,
                side.field,
                keep_end=body.keeps_end,
                prompt=sentence.prompts[side.prompt] if side.prompt else sentence.standard_prompt,
            )
            for side in (one, other)
        ]
    vectors, usage = await embed_tokens(request, body, first + second)
    vectors = finished(vectors, sentence)
    sides = vectors[: len(first)], vectors[len(first) :]
    return similarities(*sides, sentence.similarity), usage
