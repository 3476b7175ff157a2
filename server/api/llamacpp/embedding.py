"""POST /embedding, as in llama.cpp's server."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.llamacpp.schemas import EmbeddingBody
from server.api.openai.schemas.prompts import plain_list
from server.api.openai.vectors import embed_texts, json_response, number_list
from server.api.receive import admit_and_read
from server.generation.embedding import finished
from server.generation.embedding_state import embedding_state_of
from server.generation.off_loop import off_loop
from server.http.openapi import body_schema

router = APIRouter()
AS_COMPUTED = -1  # of embd_normalize


@router.post("/embedding", openapi_extra=body_schema(EmbeddingBody, task="embed"))
@router.post("/embeddings", include_in_schema=False)
async def embedding(request: Request) -> Response:
    """Compute a vector for each input, as in llama.cpp's own API."""
    body = await admit_and_read(request, EmbeddingBody, "embed")
    name, given = ("content", body.content) if body.input is None else ("input", body.input)
    assert given is not None
    vectors, _ = await embed_texts(request, body, plain_list(given), name)
    sentence = embedding_state_of(request).sentence
    vectors = finished(vectors, sentence, normalises=body.embd_normalize != AS_COMPUTED)

    def write() -> bytes:
        rows = [number_list(vector) for vector in vectors]
        return orjson.dumps([{"index": i, "embedding": [row]} for i, row in enumerate(rows)])

    return json_response(await off_loop(vectors.size, write), body.ignored)
