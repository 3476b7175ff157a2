"""POST /api/embed and /api/embeddings, as in Ollama."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import orjson
from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import MAX_TEXTS, Text, TextsBody, tokens_kept
from server.api.openai.schemas.fields import Count
from server.api.openai.vectors import check_dimensions, embed_tokens, json_response, number_list
from server.generation.embedding import Vectors, finished
from server.generation.embedding_state import embedding_state_of
from server.generation.off_loop import off_loop
from server.generation.texts import encode_texts
from server.http.openapi import body_schema
from server.ollama.options import filled
from server.ollama.receive import admit_and_read
from server.state import state_of

router = APIRouter()


class VectorBody(TextsBody):
    """The fields of both routes. A member that is null or an empty string counts as absent."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(("options", "keep_alive"))

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        return filled(value)


class EmbedBody(VectorBody):
    input: Text | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_TEXTS)] | None = None
    """A text, or several."""
    truncate: bool | None = None
    """true: cut texts that are too long. By default they are refused, unlike in Ollama."""
    dimensions: Count | None = None
    """Return only this many first numbers of a vector; default: all."""


class EmbeddingsBody(VectorBody):
    prompt: Text | None = None
    """The text."""


@router.post("/api/embed", openapi_extra=body_schema(EmbedBody, task="embed"))
async def embed(request: Request) -> Response:
    """Compute a vector of length 1 for each text, as in Ollama's API."""
    state = state_of(request)
    body = await admit_and_read(request, EmbedBody, "embed")
    sentence = embedding_state_of(request).sentence
    check_dimensions(state, sentence, body.dimensions, "dimensions")
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    rows: list[Any] = []
    num_tokens = 0
    if texts:
        vectors, num_tokens = await _vectors(request, body, texts, "input", body.truncate)
        vectors = finished(vectors, sentence, body.dimensions, normalises=True)
        rows = await off_loop(vectors.size, lambda: [number_list(row) for row in vectors])
    answer = {
        "model": body.model,
        "embeddings": rows,
        "total_duration": round((time.monotonic() - request.state.arrival) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return json_response(orjson.dumps(answer), body.ignored)


@router.post("/api/embeddings", openapi_extra=body_schema(EmbeddingsBody, task="embed"))
async def embeddings(request: Request) -> Response:
    """Compute the vector of one text as the checkpoint has it, as in Ollama's older API."""
    body = await admit_and_read(request, EmbeddingsBody, "embed")
    row: Any = []
    if body.prompt is not None:
        vectors, _ = await _vectors(request, body, [body.prompt], "prompt", None)
        [vector] = finished(vectors, embedding_state_of(request).sentence)
        row = number_list(vector)
    return json_response(orjson.dumps({"embedding": row}), body.ignored)


async def _vectors(
    request: Request, body: VectorBody, texts: list[str], param: str, truncate: bool | None
) -> tuple[Vectors, int]:
    """Return the vectors as the model computes them, and the number of tokens of the texts."""
    state, sentence = state_of(request), embedding_state_of(request).sentence
    with state.client.reserve(request.state.tenant):
        encoded = await encode_texts(
            state,
            sentence,
            texts,
            tokens_kept(body, truncate),
            param,
            keep_end=body.keeps_end,
            prompt=sentence.standard_prompt,
        )
    vectors, usage = await embed_tokens(request, body, encoded)
    return vectors, usage["prompt_tokens"]
