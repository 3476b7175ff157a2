"""/ui/api/lens: what the model does inside for one text of the caller."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine.protocol.lens import (
    MAX_EMBEDDINGS,
    MAX_LENS_BYTES,
    MAX_LENS_WAIT,
    MAX_LOGIT_POSITIONS,
    MAX_STATE_BYTES,
    MAX_TOGETHER_BYTES,
    AttentionWeights,
    LensRequest,
    LensResult,
    Stack,
    StateTrace,
)
from server.api.openai.schemas.fields import TokenId
from server.api.receive import read_unqueued
from server.generation.limits import check_no_images, check_token_ids
from server.glassbox.access import glassbox_for_ui, refuse_unknown, state_for_ui
from server.glassbox.lens.attention_maps import floats, head_map, head_row, shades, stacked
from server.glassbox.lens.captures import LensBusyError, LensFailedError, LensTooLargeError
from server.glassbox.lens.report import lens_report, shown_images
from server.glassbox.lens.text import TextBody, read_text, refuse_ranks
from server.glassbox.state import glassbox_of
from server.http.body import MAX_PARTS, Body, Part
from server.http.compression import json_response
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import NO_RETRY, ApiError, invalid
from server.http.openapi import body_schema
from server.state import AppState

router = APIRouter()
MAX_TOP, DEFAULT_TOP = 20, 10
MEAN = "mean"  # in place of a head's number
PartOfAnswer = Literal["thumbs", "residual", "predictions", "states"]
PARTS: tuple[PartOfAnswer, ...] = ("thumbs", "residual", "predictions", "states")
Layers = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=1024)
]


class LogitLens(Part):
    """The positions whose stream is read after every layer."""

    positions: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_LOGIT_POSITIONS)]
    """Indices of tokens."""
    k: Annotated[int, Field(ge=1, le=MAX_TOP)] = DEFAULT_TOP
    """Tokens in each prediction."""


class LensBody(TextBody):
    """A text, and what is shown of it."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"want": list(PARTS)}

    want: Annotated[list[PartOfAnswer], Field(max_length=MAX_PARTS)] | None = None
    """Parts of the answer. Without `thumbs`, no attention weights are kept. Default: those that the
    model has; only recurrent layers have `states`."""
    layers: Layers | None = None
    """Layers whose weights are kept for the routes of a head, and whose states are returned.
    Default: all weights, if they take at most 40 MiB, and all states, if they take at most 4 MiB.
    Those of a longer text are computed one layer at a time."""
    logit: LogitLens | None = None
    """Ask for a logit lens."""


class AttentionBody(TextBody):
    """A text, and which weights of it are returned."""

    layers: Layers | None = None
    """Layers of the answer, in their order. Default: all, if they take at most 40 MiB."""
    stack: Stack | None = None
    """decoder, encoder or cross. Default: that of the last layer."""


class EmbeddingsBody(Body):
    """Tokens to compare."""

    ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_EMBEDDINGS)]
    """Token ids."""


@router.post("/ui/api/lens", openapi_extra=body_schema(LensBody))
async def lens(request: Request) -> Response:
    """Return what the model does inside for a text.

    The answer has attention thumbnails, the residual stream, predictions at every position, the
    states of recurrent layers, and a logit lens, if they are wanted and the model has them. It is
    computed between the steps of other requests, at most once a second. Attention weights are kept
    for 60 s.
    """
    state = state_for_ui(request)
    body = await read_unqueued(request, LensBody)
    refuse_unknown(body.ignored)
    _refuse_adapter(state, body)
    text = await read_text(request, body)
    want = set(PARTS if body.want is None else body.want)
    if body.want and "states" in want and not state.loaded().state_bytes:
        raise invalid("want", "This model has no recurrent layers, so it has no states.")
    positions: tuple[int, ...] = ()
    if body.logit is not None:
        positions = tuple(sorted(set(body.logit.positions)))
        if state.loaded().kind == "encoder":
            raise invalid("logit", "This model predicts no tokens, so it has no logit lens.")
        if positions and positions[-1] >= len(text.tokens):
            raise invalid("logit.positions", f"The text has only {len(text.tokens)} tokens.")
    wanted = LensRequest(
        id=state.client.next_id(),
        tokens=text.tokens,
        source=text.source,
        images=tuple(text.images),
        positions=positions,
        top=body.logit.k if body.logit else DEFAULT_TOP,
        attention="thumbs" in want,
        layers=None if body.layers is None else tuple(sorted(set(body.layers))),
        predictions="predictions" in want or bool(positions),
        states="states" in want,
    )
    result = await _look(request, state, wanted)
    _check_layers(wanted, [*result.attention, *result.states])
    capture = None
    if result.attention:
        capture = glassbox_of(request).lens.keep(request.state.tenant, result.attention).id

    def answer() -> Response:
        document = lens_report(state.tokenizer, wanted, result, want)
        document["images"] = shown_images(text.images, text.grids)
        return json_response(request, {"capture": capture, **document})

    return await asyncio.to_thread(answer)


@router.get("/ui/api/lens/{capture}/{layer}/{head}")
async def attention_map(request: Request, capture: str, layer: str, head: str) -> Response:
    """Return the attention weights of one head, row by row: a byte round(255 sqrt(w)) each.

    `head` may be `mean`, for the mean of all heads. `?stack=` is decoder, encoder or cross; the
    default is the first that the capture has. With `?row=i` the answer is JSON with the exact
    weights of one query and, of one head with a softcap, its scores before and after it.
    """
    found = glassbox_for_ui(request).lens.capture(request.state.tenant, capture)
    if found is None:
        message = "There is no such capture. The last one of a key is kept for 60 s."
        raise ApiError(404, "not_found", message)
    stacks = found.stacks
    stack = request.query_params.get("stack", next(iter(stacks)))
    if stack not in stacks:
        raise invalid("stack", f"stack is {stack[:32]!r}; this capture has {', '.join(stacks)}.")
    layers = stacks[stack]
    place = _index("layer", layer, max(layers) + 1)
    if place not in layers:
        raise invalid("layer", f"Layer {place} has no attention. {_those(layers)}")
    weights = layers[place]
    if not weights.weights:
        message = f"The capture has no weights of layer {layer}. Make one with 'layers': [{layer}]."
        raise ApiError(404, "not_kept", message)
    number = None if head == MEAN else _index("head", head, weights.heads)
    if "row" in request.query_params:
        row = _index("row", request.query_params["row"], weights.queries)
        found_row = await asyncio.to_thread(head_row, weights, number, row)
        return json_response(request, found_row)
    shown = await asyncio.to_thread(lambda: shades(head_map(weights, number)).tobytes())
    return Response(shown, media_type="application/octet-stream")


def _index(name: str, text: str, count: int) -> int:
    """Return a number of the address, below `count`. Raises a 400 ApiError."""
    is_number = text.isdecimal() and len(text) < 10
    if not is_number or int(text) >= count:
        message = f"{name} is {text[:32]!r}; it must be a number from 0 to {count - 1}."
        raise invalid(name, message)
    return int(text)


@router.post("/ui/api/lens/attention", openapi_extra=body_schema(AttentionBody))
async def attention(request: Request) -> Response:
    """Return attention weights as a NumPy file: float32 [layers, heads, queries, keys].

    `numpy.load` reads it. Keys that a query does not see have weight 0. Nothing is kept.
    """
    state = state_for_ui(request)
    body = await read_unqueued(request, AttentionBody)
    refuse_unknown(body.ignored)
    _refuse_adapter(state, body)
    text = await read_text(request, body)
    wanted = LensRequest(
        id=state.client.next_id(),
        tokens=text.tokens,
        source=text.source,
        images=tuple(text.images),
        layers=None if body.layers is None else tuple(sorted(set(body.layers))),
        predictions=False,
        states=False,
    )
    result = await _look(request, state, wanted)
    stack = body.stack or result.attention[-1].stack
    found = [layer for layer in result.attention if layer.stack == stack]
    if not found:
        raise invalid("stack", f"This model has no stack {stack!r}.")
    _check_layers(wanted, found)
    kept = [layer for layer in found if layer.weights]
    if not kept:
        message = (
            f"The weights of all layers take more than {MAX_TOGETHER_BYTES >> 20} MiB; name some."
        )
        raise invalid("layers", message)
    if len({layer.heads for layer in kept}) > 1:
        raise invalid("layers", "These layers have different numbers of heads; name others.")
    file = io.BytesIO()
    await asyncio.to_thread(lambda: np.save(file, stacked(kept)))
    return Response(file.getvalue(), media_type="application/octet-stream")


@router.post("/ui/api/lens/embeddings", openapi_extra=body_schema(EmbeddingsBody))
async def embeddings(request: Request) -> Response:
    """Return the cosine similarities between the token embeddings of up to 32 tokens."""
    state = state_for_ui(request)
    body = await read_unqueued(request, EmbeddingsBody)
    refuse_unknown(body.ignored)
    check_token_ids(state, body.ids, "ids")
    check_no_images(state, body.ids, "ids")
    wanted = LensRequest(id=state.client.next_id(), tokens=body.ids, embeddings=True)
    result = await _look(request, state, wanted)
    cosines = floats(result.cosines).reshape(len(body.ids), -1).tolist()
    texts = [state.tokenizer.token_text(token) for token in body.ids]
    answer = {"cosine": cosines, "texts": texts}
    return json_response(request, answer)


def _check_layers(wanted: LensRequest, found: Sequence[AttentionWeights | StateTrace]) -> None:
    """Raise a 400 ApiError if the answer cannot have a layer that the request names."""
    layers = {one.layer for one in found if one.layer is not None}
    for place in wanted.layers or ():
        if layers and place not in layers:
            message = f"The answer has no layer {place}. {_those(layers)}"
            raise invalid("layers", message)


def _those(layers: Iterable[int]) -> str:
    return f"Choose from {', '.join(map(str, sorted(layers)))}."


async def _look(request: Request, state: AppState, wanted: LensRequest) -> LensResult:
    """Return the result of a lens. Raises a 400, 500 or 503 ApiError, or ClientGone."""
    refuse_ranks(state)
    if request.state.limiter is not None:
        request.state.limiter.use_tokens(len(wanted.tokens) + len(wanted.source))
    try:
        glassbox = glassbox_of(request)
        look = glassbox.lens.look(glassbox.engine, wanted, request.state.tenant)
        return await cancel_on_disconnect(request.receive, look)
    except LensBusyError:
        message = f"The engine was busy with requests for {MAX_LENS_WAIT:.0f} s; try again later."
        raise ApiError(503, "busy", message, headers={"retry-after": "5"}) from None
    except LensTooLargeError:
        message = (
            f"The weights of these layers take more than {MAX_LENS_BYTES >> 20} MiB, or their "
            f"states more than {MAX_STATE_BYTES >> 20} MiB; ask for fewer."
        )
        raise invalid("layers", message) from None
    except LensFailedError:
        message = "The lens failed; the server's log has the reason."
        raise ApiError(500, "lens_failed", message, headers=NO_RETRY) from None


def _refuse_adapter(state: AppState, body: TextBody) -> None:
    """Raise a 400 ApiError if the request names an adapter, or a 404 for an unknown model."""
    if state.adapters.find(body.model) is not None:
        raise invalid("model", "The lens shows the base model only, not its adapters.")
