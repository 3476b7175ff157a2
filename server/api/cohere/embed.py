"""POST /v2/embed and /v1/embed."""

from __future__ import annotations

import base64
import secrets
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.checkpoint.sentence import SentenceConfig
from server.api.cohere.schemas import EmbedBody
from server.api.openai.number_formats import vector_bytes
from server.api.openai.vectors import (
    check_dimensions,
    embed_tokens,
    json_response,
    number_list,
)
from server.api.receive import admit_and_read
from server.generation.embedding import Vectors, finished
from server.generation.embedding_state import embedding_state_of
from server.generation.off_loop import off_loop
from server.generation.text_prompts import purpose_prompt
from server.generation.texts import WHOLE_CONTEXT, EncodedText, encode_texts
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()
EIGHT = 8  # signs in a number
LARGEST_CODE = 127  # of int8: the largest number of each vector has it


@router.post("/v2/embed", openapi_extra=body_schema(EmbedBody, task="embed"))
async def embed(request: Request) -> Response:
    """Compute a vector for each text, in one or more forms, as in Cohere's API."""
    return await _answer(request, "2")


@router.post("/v1/embed", openapi_extra=body_schema(EmbedBody, task="embed"))
async def embed_v1(request: Request) -> Response:
    """Compute a vector for each text. Without `embedding_types`, `embeddings` is a list of them.

    Clients of Cohere's first API call this route, such as that of LangChain.
    """
    return await _answer(request, "1")


async def _answer(request: Request, version: str) -> Response:
    state, sentence = state_of(request), embedding_state_of(request).sentence
    body = await admit_and_read(request, EmbedBody, "embed")
    check_dimensions(state, sentence, body.output_dimension, "output_dimension")
    forms = list(dict.fromkeys(body.embedding_types or ["float"]))
    _check_signs(state, body, forms)
    with state.client.reserve(request.state.tenant):
        texts = await _encoded(state, sentence, body)
    vectors, usage = await embed_tokens(request, body, texts)
    vectors = finished(vectors, sentence, body.output_dimension)
    ignored = list(body.ignored)
    if body.input_type is not None and not any(sentence.prompts.values()):
        ignored.append("input_type")
    billed = {"input_tokens": usage["prompt_tokens"], "image_tokens": 0}
    is_list = version == "1" and not body.embedding_types
    answer: dict[str, Any] = {
        "id": secrets.token_hex(16),
        "texts": body.all_texts,
        "meta": {"api_version": {"version": version}, "billed_units": billed},
        "response_type": "embeddings_floats" if is_list else "embeddings_by_type",
    }

    def write() -> bytes:
        shown = {form: [_shown(vector, form) for vector in vectors] for form in forms}
        return orjson.dumps(answer | {"embeddings": shown["float"] if is_list else shown})

    return json_response(await off_loop(vectors.size * len(forms), write), ignored)


def _check_signs(state: AppState, body: EmbedBody, forms: list[str]) -> None:
    """Raise a 400 ApiError if the numbers of a vector do not fill bytes with their signs."""
    size = body.output_dimension or state.vector_size()
    if size % EIGHT and {"binary", "ubinary"}.intersection(forms):
        message = f"binary and ubinary need vectors of a multiple of 8 numbers, not {size}."
        raise invalid("embedding_types", message)


async def _encoded(state: AppState, sentence: SentenceConfig, body: EmbedBody) -> list[EncodedText]:
    """Return the token ids of each text. Raises a 400 ApiError if one is too long."""
    name = "inputs" if body.texts is None else "texts"
    prompt = sentence.standard_prompt
    if body.input_type is not None:
        prompt = purpose_prompt(sentence, body.input_type)
    longest = state.max_length()
    if body.max_tokens is not None:
        longest = min(longest, body.max_tokens)
    if longest <= state.tokenizer.added_tokens:
        message = f"max_tokens must be above {state.tokenizer.added_tokens}, not {longest}."
        raise invalid("max_tokens", message)
    limit: int | None = WHOLE_CONTEXT if longest == state.max_length() else longest
    if body.truncate == "NONE":
        limit = None
    texts = await encode_texts(
        state,
        sentence,
        body.all_texts,
        limit,
        name,
        keep_end=body.truncate == "START",
        prompt=prompt,
    )
    if (most := max(len(text.ids) for text in texts)) > longest:
        raise invalid(name, f"A text has {most} tokens, above max_tokens = {longest}.")
    return texts


def _shown(vector: Vectors, form: str) -> Any:
    """Return a vector in one form."""
    if form == "float":
        return number_list(vector)
    if form == "base64":
        return base64.b64encode(vector_bytes(vector, "float32", "little")).decode()
    if form in ("int8", "uint8"):
        largest = float(np.abs(vector).max()) or 1.0  # a zero vector stays zero
        codes = np.rint(vector / largest * LARGEST_CODE).astype("<i2")
        return (codes + 128 if form == "uint8" else codes).tolist()
    signs = np.packbits(vector > 0).astype("<i2")
    if form == "binary":
        signs = signs - 128
    return signs.tolist()
