"""POST /ui/api/ablate: draw an answer with heads or layers of the model switched off."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine.protocol.generate import Ablation
from server.api.openai.completions import complete
from server.api.openai.schemas.completion import CompletionBody
from server.api.receive import admit_and_read
from server.glassbox.access import refuse_unknown, state_for_ui
from server.http.body import Part
from server.http.errors import ApiError, invalid
from server.http.openapi import body_schema
from server.state import AppState

router = APIRouter()
MOST_PARTS = 4096  # heads or layers in one request
Index = Annotated[int, Field(ge=0, lt=2**31)]
Head = Annotated[list[Index], Field(min_length=2, max_length=2)]


class Off(Part):
    """Parts that add nothing to the residual stream. Layers and heads are counted from 0."""

    heads: Annotated[list[Head], Field(fail_fast=True, max_length=MOST_PARTS)] = Field(
        default_factory=list
    )
    """Pairs [layer, head] of self-attention in the decoder."""
    layers: Annotated[list[Index], Field(fail_fast=True, max_length=MOST_PARTS)] = Field(
        default_factory=list
    )
    """Layers of the decoder, with their attention and MLP."""


class AblateBody(CompletionBody):
    """The body of /v1/completions, and what to switch off."""

    off: Off
    """Heads and layers to switch off for this request alone."""


@router.post("/ui/api/ablate", openapi_extra=body_schema(AblateBody, streams=True))
async def ablate(request: Request) -> Response:
    """Continue a prompt as /v1/completions does, with heads or layers switched off.

    With the same seed, an empty `off` draws the same tokens as /v1/completions. Cached prefixes are
    shared only with requests that switch off the same.
    """
    state = state_for_ui(request)
    body = await admit_and_read(request, AblateBody, "generate")
    refuse_unknown(body.ignored)
    return await complete(state, request, body, _ablation(state, body.off))


def _ablation(state: AppState, off: Off) -> Ablation | None:
    """Return what to switch off; None for nothing. Raises a 400 ApiError."""
    ready = state.loaded()
    sizes = ready.ablatable_heads
    if not sizes:
        message = (
            f"Parts are not switched off with --tensor-parallel-size {ready.tensor_parallel_size}."
        )
        raise ApiError(400, "ablation_unavailable", message)
    for layer in [*off.layers, *[layer for layer, _ in off.heads]]:
        if layer >= len(sizes):
            param = "off.layers" if layer in off.layers else "off.heads"
            raise invalid(param, f"There is no layer {layer}; the decoder has {len(sizes)}.")
    for layer, head in off.heads:
        if head >= sizes[layer]:
            message = f"There is no head {head}; layer {layer} has {sizes[layer]}."
            raise invalid("off.heads", message)
    if not (off.heads or off.layers):
        return None
    heads = sorted({(layer, head) for layer, head in off.heads})
    return Ablation(tuple(heads), tuple(sorted(set(off.layers))))
