"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import EmbeddingBody
from server.api.openai.vectors import EntryNames, answer_vectors
from server.api.receive import admit_and_read
from server.http.openapi import body_schema

router = APIRouter()
EMBEDDING = EntryNames("embedding", "embedding")


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody, task="embed", binary=True))
async def embeddings(request: Request) -> Response:
    """Compute a vector for each input."""
    body = await admit_and_read(request, EmbeddingBody, "embed")
    return await answer_vectors(request, body, EMBEDDING)
