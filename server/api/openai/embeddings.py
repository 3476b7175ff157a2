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
from server.generation.embedding import Vectors, embed, normalised, token_lists
from server.generation.off_loop import off_loop
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody))
async def embeddings(request: Request) -> Response:
    """Compute a vector for each input."""
    state = state_of(request)
    body = await admit_and_read(request, EmbeddingBody, "embed")
    size, wanted = state.loaded().embedding_size, body.dimensions
    if wanted and wanted > size:
        message = f"dimensions must be from 1 to {size} (the model's vector size), not {wanted}."
        raise invalid("dimensions", message)
    with state.client.reserve():
        lists = await token_lists(state, body, body.inputs, "input")
    vectors = (await embed(request, state, body, lists))[:, :wanted]
    if state.pooling.normalised:
        vectors = normalised(vectors)
    as_text = body.encoding_format == "base64"
    head = {
        "object": "list",
        "model": state.model_name(body.model),
        "usage": encoder_usage(lists),
    }

    def render() -> bytes:
        data = [_entry(index, vector, as_text) for index, vector in enumerate(vectors)]
        return orjson.dumps(head | {"data": data})

    return json_response(await off_loop(vectors.size, render))


def _entry(index: int, vector: Vectors, as_text: bool) -> dict[str, Any]:
    """Return one entry of `data`. Each vector is dumped by itself, to hold the GIL briefly."""
    if as_text:
        embedding: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        numbers = orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
        embedding = orjson.Fragment(numbers)
    return {"object": "embedding", "index": index, "embedding": embedding}


def encoder_usage(lists: Sequence[Sequence[int]]) -> dict[str, int]:
    tokens = sum(map(len, lists))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")
