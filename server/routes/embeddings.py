"""POST /v1/embeddings and POST /v1/score (the similarity of pairs of texts)."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.description import documented
from server.embedding import Vectors, embed, normalised, token_lists
from server.errors import invalid
from server.plan import off_loop
from server.schemas.embedding import EmbeddingBody, ScoreBody
from server.service import accept

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=documented(EmbeddingBody))
async def embeddings(request: Request) -> Response:
    """Compute a vector for each input."""
    service, body = await accept(request, EmbeddingBody, "embed")
    size, wanted = service.loaded().embedding_size, body.dimensions
    if wanted and wanted > size:
        message = f"dimensions must be from 1 to {size} (the model's vector size), not {wanted}."
        raise invalid("dimensions", message)
    with service.client.expecting():
        lists = await token_lists(service, body, body.inputs, "input")
    vectors = (await embed(request, service, body, lists))[:, :wanted]
    if service.pooling.normalised:
        vectors = normalised(vectors)
    as_text = body.encoding_format == "base64"
    head = {"object": "list", "model": service.model_name(body.model), "usage": _usage(lists)}

    def render() -> bytes:
        data = [_entry(index, vector, as_text) for index, vector in enumerate(vectors)]
        return orjson.dumps(head | {"data": data})

    return _json(await off_loop(vectors.size, render))


@router.post("/v1/score", openapi_extra=documented(ScoreBody))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Compute the cosine similarity of each pair of texts; each text is encoded once."""
    service, body = await accept(request, ScoreBody, "embed")
    first, second = body.sides
    with service.client.expecting():
        lists = await token_lists(service, body, first, "text_1")
        lists += await token_lists(service, body, second, "text_2")
    vectors = normalised(await embed(request, service, body, lists))
    cosines = (vectors[: len(first)] * vectors[len(first) :]).sum(1)
    answer = {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": service.model_name(body.model),
        "data": [{"index": i, "object": "score", "score": float(c)} for i, c in enumerate(cosines)],
        "usage": _usage(lists),
    }
    return _json(orjson.dumps(answer))


def _entry(index: int, vector: Vectors, as_text: bool) -> dict[str, Any]:
    """Return one entry of `data`. Each vector is dumped by itself, to hold the GIL briefly."""
    if as_text:
        embedding: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        numbers = orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
        embedding = orjson.Fragment(numbers)
    return {"object": "embedding", "index": index, "embedding": embedding}


def _usage(lists: Sequence[Sequence[int]]) -> dict[str, int]:
    tokens = sum(map(len, lists))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
