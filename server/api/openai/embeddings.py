"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import EmbeddingBody
from server.api.receive import admit_and_read
from server.generation.embedding import Embedding, Vectors, normalised
from server.generation.off_loop import off_loop
from server.generation.texts import encode_texts
from server.http.body import ignored_header
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody, task="embed"))
async def embeddings(request: Request) -> Response:
    """Compute a vector for each input."""
    state = state_of(request)
    body = await admit_and_read(request, EmbeddingBody, "embed")
    _check_dimensions(state, body)
    with state.client.reserve():
        token_lists = await encode_texts(state, body.inputs, body.truncate_prompt_tokens, "input")
    given = request.state
    with Embedding(
        state, token_lists, given.arrival, body.priority or 0, given.limiter
    ) as embedding:
        vectors = await cancel_on_disconnect(request.receive, embedding.collect())
    vectors = vectors[:, : body.dimensions]
    if state.pooling.normalised:
        vectors = normalised(vectors)
    answer = {
        "object": "list",
        "model": state.model_name(body.model),
        "usage": encoder_usage(token_lists),
    }

    def write() -> bytes:
        data = [_entry(index, vector, body) for index, vector in enumerate(vectors)]
        return orjson.dumps(answer | {"data": data})

    return json_response(await off_loop(vectors.size, write), body.ignored)


def _check_dimensions(state: AppState, body: EmbeddingBody) -> None:
    size = state.loaded().embedding_size
    if body.dimensions is not None and body.dimensions > size:
        limit = f"from 1 to {size} (the model's vector size)"
        raise invalid("dimensions", f"dimensions must be {limit}, not {body.dimensions}.")


def _entry(index: int, vector: Vectors, body: EmbeddingBody) -> dict[str, Any]:
    """Return one entry of `data`. Each vector is dumped by itself, to hold the GIL briefly."""
    embedding: Any
    if body.encoding_format == "base64":
        embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        numbers = orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
        embedding = orjson.Fragment(numbers)
    return {"object": "embedding", "index": index, "embedding": embedding}


def encoder_usage(token_lists: Sequence[Sequence[int]]) -> dict[str, int]:
    tokens = sum(map(len, token_lists))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def json_response(body: bytes, ignored: Sequence[str]) -> Response:
    return Response(body, media_type="application/json", headers=ignored_header(ignored))
