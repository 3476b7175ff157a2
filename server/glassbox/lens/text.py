"""The text of a lens: its tokens, and the images that they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from engine.protocol.generate import Image
from engine.protocol.lens import MAX_LENS_IMAGE_TOKENS
from server.api.openai.schemas.fields import TokenId
from server.api.receive import thread_turn
from server.generation.cache_salt import cache_salt_of
from server.generation.limits import check_token_ids
from server.generation.off_loop import off_loop
from server.generation.prompts import encode_prompt
from server.http.body import MAX_PARTS, Body, PictureUrl, Text
from server.http.errors import ApiError, invalid
from server.state import AppState, state_of
from server.text.chat_template import TemplateError
from server.text.content_parts import image_part

Ids = Annotated[list[TokenId], Field(max_length=MAX_LENS_IMAGE_TOKENS)]
Grids = Sequence[list[dict[str, Any]]]


class TextBody(Body):
    """A text, or token ids. An encoder-decoder needs a source, too."""

    ids: Ids | None = None
    """Token ids; for an encoder-decoder those of the target, without the start token."""
    text: Text | None = None
    """A text instead of `ids`."""
    source_ids: Ids | None = None
    """The source's token ids, for an encoder-decoder."""
    source: Text | None = None
    """A text instead of `source_ids`."""
    images: Annotated[list[PictureUrl], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    """The URLs of the images that `ids` show, in order."""


@dataclass(frozen=True, slots=True)
class LensText:
    """The text that a lens looks at."""

    tokens: list[int]
    source: list[int]
    images: Sequence[Image] = ()
    grids: Grids = ()  # of each image: the PatchGrids of `server.images`


def refuse_ranks(state: AppState) -> None:
    """Raise a 400 ApiError if several processes compute the model: each knows a part of it."""
    size = state.loaded().tensor_parallel_size
    if size > 1:
        message = f"The lens is not possible with --tensor-parallel-size {size}."
        raise ApiError(400, "lens_unavailable", message)


async def read_text(request: Request, body: TextBody) -> LensText:
    """Return the text of a request. Raises a 400 ApiError."""
    state = state_of(request)
    refuse_ranks(state)
    start = state.start_token
    if start is None:
        if body.source is not None or body.source_ids is not None:
            raise invalid("source", "This model has no encoder that reads a source.")
        tokens = await _tokens(request, body.ids, body.text, "ids")
        return await _with_images(request, body, _checked(state, tokens, "ids"))
    if body.images:
        raise invalid("images", "This model takes no images.")
    source = await _tokens(request, body.source_ids, body.source, "source_ids")
    tokens = []
    if body.ids is not None or body.text is not None:
        tokens = await _tokens(request, body.ids, body.text, "ids", add_special_tokens=False)
    return LensText(_checked(state, [start, *tokens], "ids"), _checked(state, source, "source_ids"))


async def _with_images(request: Request, body: TextBody, tokens: list[int]) -> LensText:
    """Return the text with its images. Raises a 400 ApiError."""
    state = state_of(request)
    if not body.images:
        return LensText(tokens, [])
    parts = [image_part(url, None, "images") for url in body.images]
    chat = await state.read_images([{"role": "user", "content": parts}], "images")
    # An answer behind the prompt may have further tokens of this kind, which show nothing.
    places = [at for at, token in enumerate(tokens) if token == state.image_token]
    count = chat.num_tokens
    prompt = tokens[: places[count - 1] + 1] if len(places) > count else tokens
    try:
        images = chat.placed(prompt, cache_salt_of(request))
    except TemplateError as error:
        raise invalid("images", str(error)) from error
    return LensText(tokens, [], images, chat.grids)


async def _tokens(
    request: Request,
    ids: list[int] | None,
    text: Text | None,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Return `ids`, or the token ids of `text`. Raises a 400 ApiError unless one is given."""
    if (ids is None) == (text is None):
        raise invalid(param, f"Give either {param} or a text, and not both.")
    if text is None:
        assert ids is not None
        return ids
    state = state_of(request)
    async with thread_turn(request, len(text)):
        return await off_loop(
            len(text),
            lambda: encode_prompt(state, text, param, add_special_tokens=add_special_tokens),
        )


def _checked(state: AppState, tokens: list[int], param: str) -> list[int]:
    """Return the tokens. Raises a 400 ApiError for unknown ids and a wrong number of them."""
    check_token_ids(state, tokens, param)
    most = state.loaded().max_lens_tokens
    if not tokens:
        raise invalid(param, "The text has no tokens.")
    if len(tokens) > most:
        message = f"The text has {len(tokens)} tokens; the lens takes at most {most}."
        raise invalid(param, message, "context_length_exceeded")
    return tokens
