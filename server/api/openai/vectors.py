"""Answers that are lists of vectors, for /v1/embeddings and vLLM's /pooling."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from engine.checkpoint.sentence import SentenceConfig
from server.api.openai.number_formats import vector_bytes
from server.api.openai.schemas.embedding import EmbeddingBody, EncoderBody, TextsBody
from server.generation.embedding import Embedding, Vectors, finished
from server.generation.embedding_state import embedding_state_of
from server.generation.limits import check_priority
from server.generation.off_loop import off_loop
from server.generation.text_prompts import instruction_prompt, named_prompt
from server.generation.texts import EncodedText, Texts, encode_texts, padded
from server.http.body import ignored_header
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import invalid
from server.state import AppState, state_of

MAX_LISTED = 256  # vectors whose places one header lists
Usage = dict[str, int]


@dataclass(frozen=True)
class EntryNames:
    """The names of an entry of `data`: its `object`, and the field of the vector."""

    kind: str
    field: str
    id_prefix: str | None = None  # of the id of an answer; None: it has none, as in OpenAI's API


async def embed_texts(
    request: Request, body: TextsBody, texts: Texts, param: str
) -> tuple[Vectors, Usage]:
    """Return the vector of each text as the model computes it, and the usage.

    `param` names the field of the texts.
    """
    state = state_of(request)
    with state.client.reserve(request.state.tenant):
        most = body.truncate_prompt_tokens
        sentence = embedding_state_of(request).sentence
        encoded = await encode_texts(
            state,
            sentence,
            texts,
            most,
            param,
            keep_end=body.keeps_end,
            prompt=sentence.standard_prompt,
        )
    return await embed_tokens(request, body, encoded)


async def embed_tokens(
    request: Request, body: EncoderBody, texts: Sequence[EncodedText]
) -> tuple[Vectors, Usage]:
    """Return the vector of each text as the engine computes it, and the usage."""
    given = request.state
    tokens = sum(len(text.ids) for text in texts)
    given.access.model = state_of(request).model_name(body.model)
    given.access.prompt_tokens = tokens
    priority = body.priority or 0
    check_priority(request, priority)
    with Embedding(
        state_of(request),
        embedding_state_of(request),
        texts,
        given.arrival,
        priority,
        given.tenant,
        given.limiter,
    ) as embedding:
        vectors = await cancel_on_disconnect(request.receive, embedding.collect())
    return vectors, {"prompt_tokens": tokens, "total_tokens": tokens}


def check_dimensions(
    state: AppState, sentence: SentenceConfig, given: int | None, param: str
) -> None:
    """Raise a 400 ApiError if the model has no vectors of the size that the request asks for."""
    size = state.loaded().embedding_size
    if given is None or given == size:
        return
    if given > size:
        limit = f"from 1 to {size} (the model's vector size)"
        raise invalid(param, f"{param} must be {limit}, not {given}.")
    sizes = sentence.shorter_sizes
    if state.config.allow_dimensions or sizes is None or given in sizes:
        return
    known = ", ".join(map(str, sorted({*sizes, size})))
    message = (
        f"{param} must be one of {known}, not {given}: the checkpoint does not say that it was "
        "trained for vectors of other sizes. The server's flag --allow-dimensions allows them."
    )
    raise invalid(param, message)


async def answer_vectors(request: Request, body: EmbeddingBody, names: EntryNames) -> Response:
    """Return the vectors of the inputs, in the format that the request asks for."""
    state, sentence = state_of(request), embedding_state_of(request).sentence
    check_dimensions(state, sentence, body.dimensions, "dimensions")
    as_header = body.encoding_format == "bytes"
    if as_header and len(body.inputs) > MAX_LISTED:
        message = f"bytes takes at most {MAX_LISTED} inputs; use bytes_only or base64."
        raise invalid("encoding_format", message)
    with state.client.reserve(request.state.tenant):
        texts = await _encoded(state, sentence, body)
    vectors, usage = await embed_tokens(request, body, texts)
    vectors = finished(vectors, sentence, body.dimensions, body.use_activation)
    head: dict[str, Any] = {
        "object": "list",
        "model": state.model_name(body.model),
        "usage": usage,
    }
    if names.id_prefix is not None:
        head |= {"id": names.id_prefix + secrets.token_hex(16), "created": int(time.time())}
    headers = ignored_header(body.ignored)
    if body.encoding_format in ("bytes", "bytes_only"):
        content = await off_loop(vectors.size, lambda: _bytes(body, vectors))
        if as_header:
            head["data"] = [_place(index, body, vectors) for index in range(len(vectors))]
            headers["metadata"] = orjson.dumps(head).decode()
        return Response(content, media_type="application/octet-stream", headers=headers)

    def write() -> bytes:
        data = [_entry(index, vector, body, names) for index, vector in enumerate(vectors)]
        return orjson.dumps(head | {"data": data})

    return Response(
        await off_loop(vectors.size, write), media_type="application/json", headers=headers
    )


async def _encoded(
    state: AppState, sentence: SentenceConfig, body: EmbeddingBody
) -> list[EncodedText]:
    """Return the token ids of each input. Raises a 400 ApiError if one is too long."""
    texts = await encode_texts(
        state,
        sentence,
        body.inputs,
        body.truncate_prompt_tokens,
        "input",
        keep_end=body.keeps_end,
        add_special_tokens=body.add_special_tokens is not False,
        prompt=_prompt(sentence, body),
    )
    return await padded(state, texts) if body.padding == "max_length" else texts


def _prompt(sentence: SentenceConfig, body: EmbeddingBody) -> str:
    """Return the text in front of each input. Raises a 400 ApiError if the model has none."""
    if body.prompt is not None:
        return body.prompt
    if body.prompt_name is not None:
        return named_prompt(sentence, body.prompt_name)
    if body.instruction is not None:
        return instruction_prompt(sentence, body.instruction)
    return sentence.standard_prompt


def _bytes(body: EmbeddingBody, vectors: Vectors) -> bytes:
    return vector_bytes(vectors, body.embed_dtype or "float32", body.endianness or "native")


def _place(index: int, body: EmbeddingBody, vectors: Vectors) -> dict[str, Any]:
    """Return where a vector is among the bytes of all."""
    size = len(_bytes(body, vectors[:1]))
    return {
        "index": index,
        "embed_dtype": body.embed_dtype or "float32",
        "endianness": body.endianness or "native",
        "start": index * size,
        "end": (index + 1) * size,
        "shape": [vectors.shape[1]],
    }


def _entry(index: int, vector: Vectors, body: EmbeddingBody, names: EntryNames) -> dict[str, Any]:
    """Return one entry of `data`. Each vector is dumped by itself, to hold the GIL briefly."""
    value: Any
    if body.encoding_format == "base64":
        value = base64.b64encode(_bytes(body, vector)).decode()
    else:
        value = number_list(vector)
    return {"object": names.kind, "index": index, names.field: value}


def number_list(vector: Vectors) -> orjson.Fragment:
    """Return the JSON of a vector."""
    numbers = orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.Fragment(numbers)


def json_response(body: bytes, ignored: Sequence[str]) -> Response:
    """Return a JSON text, with the names of ignored fields in a header."""
    return Response(body, media_type="application/json", headers=ignored_header(ignored))
