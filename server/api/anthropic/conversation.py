"""Messages of Anthropic's API as chat templates read them.

One message of this API may hold several of a template: each tool result is a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from server.api.anthropic.answer_blocks import thoughts_in
from server.api.anthropic.request_blocks import (
    AnyBlock,
    Message,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.images.content import ImageBlock
from server.text.content_parts import content_of, content_with_images, image_part, text_part

# The start of a line that Claude Code puts before its system prompt. It differs in each request,
# so that no prefix of the prompt would be found in the cache.
BILLING_HEADER = "x-anthropic-billing-header"
Json = dict[str, Any]


def template_messages(system: Texts | None, messages: Sequence[Message]) -> list[Json]:
    """Return the conversation for a chat template.

    Consecutive messages of one role are one turn, as in Anthropic's API.
    """
    if system is not None:
        messages = [Message(role="system", content=_blocks(system)), *messages]
    found: list[Json] = []
    names: dict[str, str] = {}  # of the tools, by the id of the call
    for role, group in groupby(messages, key=lambda message: message.role):
        turn = list(group)
        blocks = [block for message in turn for block in message.blocks]
        names |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
        match role:
            case "system":
                found += _system_messages(_separate(blocks, turn))
            case "assistant":
                found.append(_assistant_message(blocks))
            case "user":
                found += _user_messages(_separate(blocks, turn), names)
    # Templates read the first message.
    return found or [{"role": "system", "content": ""}]


def _blocks(texts: Texts) -> list[AnyBlock]:
    if isinstance(texts, str):
        return [TextBlock(type="text", text=texts)]
    return [*texts]


def _separate(blocks: Sequence[AnyBlock], turn: Sequence[Message]) -> list[AnyBlock]:
    """Return blocks where the texts of several messages are one, with a line for each.

    Templates that read lists of parts often write nothing between two parts.
    """
    if len(turn) == 1 or any(isinstance(block, ImageBlock) for block in blocks):
        return [*blocks]
    others: list[AnyBlock] = [block for block in blocks if not isinstance(block, TextBlock)]
    texts = _texts(blocks)
    return [*others, TextBlock(type="text", text="\n".join(texts))] if texts else others


def _texts(blocks: Sequence[AnyBlock]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]


def _system_messages(blocks: Sequence[AnyBlock]) -> Iterator[Json]:
    """Yield the system message, unless nothing is left without the billing header."""
    texts = [_without_billing_header(text) for text in _texts(blocks)]
    content = content_of([text for text in texts if text])
    if content:
        yield {"role": "system", "content": content}


def _without_billing_header(text: str) -> str:
    if BILLING_HEADER not in text:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(BILLING_HEADER))


def _assistant_message(blocks: Sequence[AnyBlock]) -> Json:
    """Return the turn of the model. Its texts are parts of one text, which calls interrupted."""
    message: Json = {"role": "assistant", "content": "".join(_texts(blocks))}
    thinking = [block for block in blocks if isinstance(block, ThinkingBlock)]
    thoughts = [block.thinking or thoughts_in(block.signature or "") for block in thinking]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        # Templates distinguish a missing text from an empty one.
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _user_messages(blocks: Sequence[AnyBlock], names: dict[str, str]) -> Iterator[Json]:
    """Yield the results of calls, then the texts as one message."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        yield _tool_message(result, names)
    parts = _parts(blocks, "messages.content.image")
    if parts or not results:
        yield {"role": "user", "content": content_with_images(parts)}


def _parts(blocks: Sequence[AnyBlock], name: str) -> list[Json]:
    """Return the texts and images as parts of a content."""
    parts = []
    for block in blocks:
        if isinstance(block, TextBlock):
            parts.append(text_part(block.text))
        elif isinstance(block, ImageBlock):
            parts.append(image_part(block.source.address, None, name))
    return parts


def _tool_message(result: ToolResultBlock, names: dict[str, str]) -> Json:
    content = result.content or ""
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else [*content]
    parts = _parts(blocks, "messages.content.content.image")
    if not parts or parts[0]["type"] != "text":
        parts.insert(0, text_part(""))
    if result.is_error:
        parts[0] = text_part(f"Error: {parts[0]['text']}")
    elif len(parts) > 1 and not parts[0]["text"]:
        del parts[0]
    message: Json = {"role": "tool", "tool_call_id": result.tool_use_id}
    message["content"] = content_with_images(parts)
    if result.tool_use_id in names:
        message["name"] = names[result.tool_use_id]
    return message
