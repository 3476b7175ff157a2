"""POST /pooling: the vectors of /v1/embeddings in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import EmbeddingBody
from server.api.openai.vectors import EntryNames, answer_vectors
from server.api.receive import admit_and_read
from server.http.errors import unsupported
from server.http.openapi import body_schema

router = APIRouter()
POOLING = EntryNames("pooling", "data", "pool-")

Task = Literal["embed", "token_embed", "classify", "token_classify", "plugin"]


class PoolingBody(EmbeddingBody):
    """The body of /v1/embeddings, with a task."""

    task: Annotated[Task | None, WithJsonSchema({"enum": ["embed", None]})] = None
    """Only `embed`: a vector for each input."""


@router.post("/pooling", openapi_extra=body_schema(PoolingBody, task="embed", binary=True))
async def pooling(request: Request) -> Response:
    """Compute a vector for each input, as in vLLM."""
    body = await admit_and_read(request, PoolingBody, "embed")
    if body.task not in (None, "embed"):
        message = f"Unsupported task: {body.task!r}; this model has one vector for each text."
        if body.task == "plugin":
            message = "No IOProcessor plugin installed. The one task here is embed."
        raise unsupported("task", message)
    return await answer_vectors(request, body, POOLING)
