"""Answer a chat: the one path from a conversation to a response, for every chat API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from server.generation.chat_prompt import (
    Chat,
    ChatPrompt,
    chat_prompt,
    unread_arguments,
    with_images,
)
from server.generation.off_loop import off_loop
from server.generation.options import GenerationOptions
from server.generation.parsing import parsing_of, with_grammar
from server.generation.prepare import PreparedRequest, prepare
from server.generation.response import respond
from server.generation.writer import Writer
from server.state import AppState


async def answer_chat(
    state: AppState,
    request: Request,
    read_chat: Callable[[], Chat],
    options: GenerationOptions,
    writer: Callable[[PreparedRequest], Writer],
    *,
    param: str,
    ignored: Sequence[str] = (),
    inspect: Callable[[Chat, ChatPrompt], Awaitable[None]] | None = None,
) -> Response:
    """Return the response to a chat.

    `read_chat` takes the conversation from the body; it runs in a thread if the body is long.
    `param` names the field of the messages in errors. `inspect` sees the prompt before `writer` is
    called. Raises what `chat_prompt` and `prepare` raise.
    """
    size = len(await request.body())
    with state.client.reserve(request.state.tenant):
        chat = await off_loop(size, read_chat)
        chat = await with_images(state, chat, param, request.receive)
        prompt = await chat_prompt(state, chat)
        if inspect is not None:
            await inspect(chat, prompt)
        parsing = parsing_of(state, chat, prompt.text)
        if parsing is not None:
            work = partial(with_grammar, state, options, chat, prompt.text)
            options = await off_loop(size, work)
    names = [*ignored, *unread_arguments(state, chat)]
    prepared = prepare(
        state,
        request,
        options,
        [prompt.ids],
        param=param,
        ignored=names,
        parsing=parsing,
        shown=chat.images,
    )
    return respond(state, prepared, writer(prepared.without_pixels))
