"""Contents that are lists of text parts, and whether a chat template reads them.

A template that loops over the parts gets the list, as in transformers, and writes what it likes
between them. Any other would print Python's form of the list, or fail.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.protocol.generate import Image

Json = dict[str, Any]


def text_part(text: str) -> Json:
    """Return a part of a content."""
    return {"type": "text", "text": text}


def text_parts(texts: Sequence[str]) -> list[Json]:
    """Return a content that is a list of parts, as OpenAI's chats have it."""
    return [text_part(text) for text in texts]


def image_part(url: str, detail: str | None, name: str) -> Json:
    """Return an image of a message: a data: URL or an address, as its client gave it.

    `name` is that of such parts in the request, such as "messages.content.image_url".
    """
    return {"type": "image", "url": url, "detail": detail, "name": name}


def texts_of(content: Any) -> list[str]:
    """Return the texts of a content: a text, a list of parts, or None."""
    if isinstance(content, list):
        return [part["text"] for part in content if "text" in part]
    return [content or ""]


def joined(content: Any) -> str:
    """Return a content as one text, with a line per part as in vLLM."""
    return "\n".join(texts_of(content))


def content_of(texts: Sequence[str]) -> str | list[Json]:
    """Return texts that a message consists of as its content: one text, or a list of parts."""
    return text_parts(texts) if len(texts) > 1 else "".join(texts)


def content_with_images(parts: Sequence[Json]) -> str | list[Json]:
    """Return the content of a message with these parts: one text, or the list."""
    if all(part["type"] == "text" for part in parts):
        return content_of([part["text"] for part in parts])
    return list(parts)


def has_late_system(messages: Sequence[Json]) -> bool:
    """Return whether a message of the system follows another message."""
    return any(message["role"] == "system" for message in messages[1:])


def with_system_first(messages: Sequence[Json]) -> list[Json]:
    """Return messages in which those of the system are one, at the beginning.

    Messages of the user that become neighbours are one, too: such templates often need turns.
    """
    texts: list[str] = []
    others: list[Json] = []
    is_moved = False  # the last message was of the system
    for message in messages:
        if message["role"] == "system":
            texts += texts_of(message["content"])
        elif is_moved and others and message["role"] == others[-1]["role"] == "user":
            both = [joined(others[-1]["content"]), joined(message["content"])]
            others[-1] = {**others[-1], "content": "\n".join(both)}
        else:
            others.append(message)
        is_moved = message["role"] == "system"
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def reads_parts(render: Callable[[list[Json]], str], role: str) -> bool:
    """Try whether a template reads a list of parts as the content of messages of `role`.

    It does if both texts are in the prompt and nothing else of the parts is. Raises what `render`
    raises.
    """
    first, second, other = (secrets.token_hex(8) for _ in range(3))
    parts = [{**part, other: ""} for part in text_parts([first, second])]
    text = render(_trial(role, parts))
    return 0 <= text.find(first) < text.find(second) and other not in text


def _trial(role: str, content: list[Json]) -> list[Json]:
    """Return a conversation in which a message of `role` has `content`."""
    user = {"role": "user", "content": "Hi"}
    message = {"role": role, "content": content}
    match role:
        case "system":
            return [message, user]
        case "assistant":
            return [user, message, user]
        case "tool":
            function = {"name": "f", "arguments": {}}
            call = {"id": "call00001", "type": "function", "function": function}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            return [user, calling, {**message, "tool_call_id": call["id"], "name": "f"}]
    return [message]


def shows_images(messages: Sequence[Json]) -> bool:
    """Return whether a message of a chat has an image that is not read yet."""
    contents = [message.get("content") for message in messages]
    lists = [content for content in contents if isinstance(content, list)]
    return any(part["type"] == "image" for content in lists for part in content)


class ChatImages(Protocol):
    """The messages of a chat without images, and its images: `server.images.shown`."""

    @property
    def messages(self) -> list[Json]:
        """The messages, with a marker for each image."""

    @property
    def unread(self) -> Sequence[str]:
        """The names of parts that this model does not read."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt whose embeddings are the images'."""

    @property
    def grids(self) -> Sequence[list[Json]]:
        """Where the embeddings of each image are on the picture: `PatchGrid` in `server.images`."""

    def expanded(self, text: str) -> str:
        """Return a prompt's text with all tokens of its images. Raises TemplateError."""

    def placed(self, ids: Sequence[int], salt: str) -> tuple[Image, ...]:
        """Return the images with the places of their tokens in the prompt. Raises TemplateError."""
