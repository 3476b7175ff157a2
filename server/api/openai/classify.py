"""POST /v1/classify: the labels of texts or of pairs, as in vLLM."""

from __future__ import annotations

import secrets
import time

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.classify import ClassifyBody
from server.api.openai.vectors import embed_tokens, json_response, number_list
from server.api.receive import admit_and_read
from server.generation.embedding_state import embedding_state_of
from server.generation.pairs import PairLimits, Side, activated, encode_pairs
from server.generation.texts import EncodedText, encode_texts
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/classify", openapi_extra=body_schema(ClassifyBody, task="classify"))
@router.post("/classify", include_in_schema=False)
async def classify(request: Request) -> Response:
    """Return the probabilities of all labels of each text or pair, and the most probable label."""
    state, head = state_of(request), embedding_state_of(request).sentence.head
    body = await admit_and_read(request, ClassifyBody, "classify")
    assert head is not None
    with state.client.reserve(request.state.tenant):
        texts = await _encoded(request, body)
    logits, usage = await embed_tokens(request, body, texts)
    numbers = activated(logits, "Identity" if body.raw_field else head.of_labels)
    answer = {
        "id": f"classify-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_name(body.model),
        "data": [
            {
                "index": index,
                "label": head.labels[int(row.argmax())],
                "probs": number_list(row),
                "num_classes": len(head.labels),
            }
            for index, row in enumerate(numbers)
        ],
        "usage": usage,
    }
    return json_response(orjson.dumps(answer), body.ignored)


async def _encoded(request: Request, body: ClassifyBody) -> list[EncodedText]:
    """Return the token ids of each text or pair. Raises a 400 ApiError if one is too long."""
    state, own = state_of(request), embedding_state_of(request)
    if body.input is None:
        return await encode_pairs(
            state,
            own,
            Side("text_1", body.first_texts),
            Side("text_2", body.second_texts),
            PairLimits(body.truncate_prompt_tokens, keep_end=body.keeps_end),
        )
    return await encode_texts(
        state,
        own.sentence,
        body.inputs,
        body.truncate_prompt_tokens,
        "input",
        keep_end=body.keeps_end,
        add_special_tokens=body.add_special_tokens is not False,
    )
