"""Images of a chat are read before its prompt is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server.generation.chat_prompt import Chat
from server.http.errors import unsupported
from server.state import AppState
from server.text.content_parts import text_part
from server.text.image_text import image_parts, marked

LEFT_OUT = "[An image was left out: this model reads text only.]"


async def with_images(state: AppState, chat: Chat, param: str) -> Chat:
    """Return a chat whose images are read; its messages hold a marker for each.

    For a model that takes images, its placeholders in the texts of messages become plain text.
    A model that takes none reads that images in the results of calls were left out, because agents
    send them to any model. `param` names the field of the messages. Raises a 400 ApiError.
    """
    sources = [part for message in chat.messages for part in image_parts(message)]
    if state.images is None:
        return _without_images(chat, param) if sources else chat
    images = await state.images.read(sources, param)
    messages = [marked(message, state.images) for message in chat.messages]
    return replace(chat, messages=messages, images=tuple(images))


def _without_images(chat: Chat, param: str) -> Chat:
    names = []
    messages = []
    for message in chat.messages:
        found = image_parts(message)
        if found and message["role"] != "tool":
            raise unsupported(param, "This model takes no images; send text only.")
        names += [part["name"] for part in found]
        messages.append(_without(message) if found else message)
    return replace(chat, messages=messages, unread=tuple(names))


def _without(message: dict[str, Any]) -> dict[str, Any]:
    parts = [
        text_part(LEFT_OUT) if part["type"] == "image" else part for part in message["content"]
    ]
    return {**message, "content": parts}
