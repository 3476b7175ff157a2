"""POST /ui/api/explain: how each token of a past answer was drawn."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from engine.protocol.generate import CUT_CODES, Explain, Explained, GenerateRequest, SamplingParams
from server.api.openai.schemas.fields import Between, TokenId, TokenIds
from server.api.openai.schemas.generate import GenerateBody
from server.api.receive import admit_and_read
from server.generation.cache_salt import cache_salt_of
from server.generation.limits import (
    check_no_images,
    check_priority,
    check_token_ids,
    context_exceeded,
)
from server.generation.parsing import with_raw_thoughts
from server.generation.sampling import check_option_tokens, sampling_params
from server.glassbox.access import refuse_unknown, state_for_ui
from server.glassbox.explain.explanation import ExplainedAnswer, Explanation
from server.glassbox.state import glassbox_of
from server.http.body import MAX_PARTS, Body, PictureUrl, check_supported
from server.http.compression import json_response
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import ApiError
from server.http.openapi import body_schema
from server.state import AppState
from server.text.content_parts import image_part
from server.text.tokenizer import Tokenizer

MAX_TOKENS = 1024  # of an answer
MAX_CANDIDATES = 32  # of a token
MAX_PER_STEP = 64  # tokens that a step explains, fewer with a large vocabulary
MAX_LOGITS = 1 << 19  # that a step explains: up to 0.2 s on a CPU, if the distribution is flat
MAX_WAIT = 30.0  # seconds for the explanations before this one
RANDOM_SEED = -1

router = APIRouter()


class DrawnBody(GenerateBody):
    """The sampling fields of the request that the answer belongs to."""

    OPERATION = "text_completion"
    # Fields of both APIs that no draw depends on.
    ACCEPTED: ClassVar[frozenset[str]] = GenerateBody.ACCEPTED | frozenset(
        ("prompt", "messages", "echo", "logprobs", "top_logprobs")
    )

    @property
    def num_logprobs(self) -> int:
        return -1


class ExplainBody(Body):
    DEFAULTS: ClassVar[dict[str, Any]] = {"candidates": MAX_CANDIDATES}

    prompt_ids: TokenIds
    """The prompt; of an encoder-decoder, the source."""
    answer_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
    """The answer, with its end token."""
    images: Annotated[list[PictureUrl], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    """The URLs of the images that the prompt shows, in order."""
    params: DrawnBody = Field(default_factory=lambda: DrawnBody.model_validate({}))
    """The sampling fields of its request. Choice k of a request has `seed` + k."""
    candidates: Annotated[int, Between(1, MAX_CANDIDATES)] | None = None
    """The likeliest tokens to return with each token."""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        params = value.get("params") if isinstance(value, dict) else None
        if isinstance(params, dict):
            check_supported(DrawnBody, params)
        return value


@router.post("/ui/api/explain", openapi_extra=body_schema(ExplainBody, task="generate"))
async def explain(request: Request) -> Response:
    """Return the candidates of each token of an answer, what removed them, and their luck.

    The engine computes the answer once more, like a prompt, and repeats each draw. `agrees` counts
    the draws that give the answer's token. It is null, like all `luck`, without the `seed`.
    """
    state = state_for_ui(request)
    body = await admit_and_read(request, ExplainBody, "generate")
    refuse_unknown([*body.ignored, *[f"params.{name}" for name in body.params.ignored]])
    wanted = _request(state, request, body)
    wanted = await _with_images(state, body, wanted, request.receive)
    found = await cancel_on_disconnect(request.receive, _explained(state, request, wanted))
    assert wanted.explain is not None
    knows_dice = body.params.seed not in (None, RANDOM_SEED)
    report = _Report(state.tokenizer, wanted.explain, knows_dice=knows_dice)
    return await asyncio.to_thread(lambda: json_response(request, report.document(found)))


async def _explained(state: AppState, request: Request, wanted: GenerateRequest) -> ExplainedAnswer:
    """Return what the engine finds. Raises a 503 ApiError if others take the turn for too long.

    One at a time: what a step explains is added to its time, which all requests wait for.
    """
    turn = glassbox_of(request).explain_turn
    try:
        async with asyncio.timeout(MAX_WAIT):
            await turn.acquire(request.state.tenant)
    except TimeoutError:
        message = f"Other answers were being explained for {MAX_WAIT:.0f} s; try again later."
        raise ApiError(503, "busy", message, headers={"retry-after": "5"}) from None
    try:
        metrics = request.app.state.metrics
        with Explanation(state, metrics, wanted, request.state.limiter) as explanation:
            return await explanation.collect()
    finally:
        turn.release(request.state.tenant)


def _request(state: AppState, request: Request, body: ExplainBody) -> GenerateRequest:
    """Return the engine's request. Raises a 400 ApiError."""
    options = body.params.options()
    model = body.model or options.model
    state.model_name(model)
    adapter = state.adapters.find(model)
    prompt, answer = body.prompt_ids, body.answer_ids
    options = with_raw_thoughts(state, options, [prompt])
    check_token_ids(state, prompt, "prompt_ids")
    if not body.images:
        check_no_images(state, prompt, "prompt_ids")
    check_token_ids(state, answer, "answer_ids")
    check_option_tokens(state, options)
    check_priority(request, options.priority)
    encoder_prompt: list[int] = []
    if state.start_token is not None:
        encoder_prompt = prompt
        prompt = [state.start_token]
    longest, length = state.max_length(), len(prompt) + len(answer)
    if max(length, len(encoder_prompt)) > longest:
        given = f"prompt_ids and answer_ids have {len(body.prompt_ids)} + {len(answer)}"
        raise context_exceeded(longest, given, "prompt_ids")
    most = MAX_LOGITS // state.loaded().vocab_size
    max_per_step = max(1, min(MAX_PER_STEP, most))
    params = msgspec.structs.replace(sampling_params(state, options), max_tokens=len(answer))
    return GenerateRequest(
        id=state.client.next_id(),
        prompt=[*prompt, *answer[:-1]],
        params=SamplingParams(max_tokens=1, temperature=0.0),
        arrival=request.state.arrival,
        priority=options.priority,
        salt=cache_salt_of(request, options.cache_salt),
        tenant=request.state.tenant,
        encoder_prompt=encoder_prompt,
        explain=Explain(answer, params, body.candidates or MAX_CANDIDATES, max_per_step),
        adapter=0 if adapter is None else adapter.id,
    )


async def _with_images(
    state: AppState, body: ExplainBody, wanted: GenerateRequest, receive: Receive
) -> GenerateRequest:
    """Return the request with the images of its prompt. Raises a 400 ApiError, or TemplateError."""
    if not body.images:
        return wanted
    parts = [image_part(url, None, "images") for url in body.images]
    reading = state.read_images([{"role": "user", "content": parts}], "images")
    chat = await cancel_on_disconnect(receive, reading)
    images = chat.placed(body.prompt_ids, wanted.salt)
    return msgspec.structs.replace(wanted, images=images)


class _Report:
    """Writes the answer of the route."""

    def __init__(self, tokenizer: Tokenizer, explain: Explain, *, knows_dice: bool) -> None:
        """`knows_dice` is whether the request has named its seed."""
        self._tokenizer = tokenizer
        self._explain = explain
        self._knows_dice = knows_dice
        self._checks = knows_dice  # whether drawn tokens can be compared with the answer's

    def document(self, found: ExplainedAnswer) -> dict[str, Any]:
        """Return the answer. Takes long for a long one."""
        answer = self._explain.answer
        is_greedy = not found.tokens[0].lucks
        self._checks = self._knows_dice or is_greedy
        tokens = [
            self._token(token, sent) for token, sent in zip(found.tokens, answer, strict=True)
        ]
        ids = {*answer, *[one for token in found.tokens for one in token.ids]}
        text_of = self._tokenizer.token_text
        agrees = None
        if self._checks:
            agrees = sum(token[6] for token in tokens)
        return {
            "agrees": agrees,
            "cached_tokens": found.cached_tokens,
            "tokens": tokens,
            "pieces": {str(token): text_of(token) for token in sorted(ids)},
            "forced": [token.index for token in found.tokens if token.is_forced],
            "cuts": [name.replace("_", "-") for name in CUT_CODES],
        }

    def _token(self, token: Explained, sent: int) -> list[Any]:
        return [
            sent,
            token.rank,
            _short(token.entropy),
            _short(token.final_entropy),
            token.kept,
            _short(token.mass),
            token.drawn == sent if self._checks else None,
            self._candidates(token),
            token.drawn if self._checks else None,
        ]

    def _candidates(self, token: Explained) -> list[tuple[Any, ...]]:
        lucks: list[float | None] = [None] * len(token.ids)
        if self._knows_dice and token.lucks:
            lucks = [float(f"{luck:.9g}") for luck in token.lucks]  # every bit of a float32
        columns = (token.logits, token.raw, token.adjusted, token.tempered)
        shorts = [list(map(_short, column)) for column in columns]
        return list(zip(token.ids, *shorts, token.cuts, lucks, strict=True))


def _short(value: float) -> float:
    """Return a float32 with the digits that it has."""
    return float(f"{value:.7g}")
