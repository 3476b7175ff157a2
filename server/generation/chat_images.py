"""Images of a chat are read before its prompt is written."""

from __future__ import annotations

from dataclasses import replace

from server.generation.chat_prompt import Chat
from server.http.errors import unsupported
from server.state import AppState
from server.text.image_text import image_parts, marked


async def with_images(state: AppState, chat: Chat, param: str) -> Chat:
    """Return a chat whose images are read; its messages hold a marker for each.

    For a model that takes images, its placeholders in the texts of messages become plain text.
    `param` names the field of the messages. Raises a 400 ApiError.
    """
    reader = state.images
    sources = [part for message in chat.messages for part in image_parts(message)]
    if reader is None:
        if sources:
            raise unsupported(param, "This model takes no images; send text only.")
        return chat
    images = await reader.read(sources, param)
    messages = [marked(message, reader) for message in chat.messages]
    return replace(chat, messages=messages, images=tuple(images))
