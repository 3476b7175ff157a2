"""POST /embed, as in text-embeddings-inference (router/src/http/server.rs)."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import orjson
from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.embedding import TextsBody, tokens_kept
from server.api.openai.schemas.fields import Count
from server.api.openai.schemas.prompts import Inputs, Plain, plain_list
from server.api.openai.vectors import check_dimensions, embed_tokens, json_response, number_list
from server.api.receive import admit_and_read
from server.generation.embedding import finished
from server.generation.embedding_state import embedding_state_of
from server.generation.off_loop import off_loop
from server.generation.text_prompts import named_prompt
from server.generation.texts import encode_texts
from server.http.body import failure
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


class EmbedBody(TextsBody):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    DEFAULTS: ClassVar[dict[str, Any]] = TextsBody.DEFAULTS | {"normalize": True}

    inputs: Inputs
    """Texts or their token ids. Texts among ids get no special tokens."""
    truncate: bool | None = None
    """Cut texts that are too long, as `truncate_prompt_tokens` = −1; false: refuse them."""
    normalize: bool | None = None
    """Return vectors of length 1; false: as the model computes them."""
    prompt_name: str | None = None
    """The name of the checkpoint's prompt that is put in front of each text."""
    dimensions: Count | None = None
    """Return only this many first numbers of a vector; default: all."""

    @model_validator(mode="after")
    def _prompt_of_texts(self) -> Self:
        if self.prompt_name is not None and any(isinstance(text, list) for text in self.texts):
            raise failure("invalid", "goes before texts; inputs has token ids", "prompt_name")
        return self

    @property
    def texts(self) -> list[Plain]:
        return plain_list(self.inputs)


@router.post("/embed", openapi_extra=body_schema(EmbedBody, task="embed"))
async def embed(request: Request) -> Response:
    """Compute a vector for each input; the answer is a list of them."""
    state, sentence = state_of(request), embedding_state_of(request).sentence
    body = await admit_and_read(request, EmbedBody, "embed")
    check_dimensions(state, sentence, body.dimensions, "dimensions")
    prompt = sentence.standard_prompt
    if body.prompt_name is not None:
        prompt = named_prompt(sentence, body.prompt_name)
    with state.client.reserve(request.state.tenant):
        texts = await encode_texts(
            state,
            sentence,
            body.texts,
            tokens_kept(body, body.truncate),
            "inputs",
            keep_end=body.keeps_end,
            prompt=prompt,
        )
    vectors, _ = await embed_tokens(request, body, texts)
    vectors = finished(vectors, sentence, body.dimensions, body.normalize is not False)

    def write() -> bytes:
        return orjson.dumps([number_list(vector) for vector in vectors])

    return json_response(await off_loop(vectors.size, write), body.ignored)
