"""Marks in the parts of a chat: the text of the prompt differs from there on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from server.text.content_parts import text_parts, texts_of
from server.text.tools import Tool

MARK = "¤"
Json = dict[str, Any]


def mark_tool(tool: Tool) -> Tool:
    """Return a tool with a mark before its description and its name: either may be first."""
    function = tool.for_template["function"]
    texts = {name: function[name] for name in ("description", "name") if function.get(name)}
    marked = {**function, **{name: MARK + text for name, text in texts.items()}}
    return dataclasses.replace(tool, for_template={**tool.for_template, "function": marked})


def mark_begin(message: Json) -> Json:
    """Return a message with a mark before each of its texts and in the names of its calls."""
    marked = dict(message)
    if message.get("reasoning_content"):
        marked["reasoning_content"] = MARK + message["reasoning_content"]
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if content or not calls:
        marked["content"] = _marked_content(content, 0, lambda text: MARK + text)
    if calls:
        marked["tool_calls"] = [_marked_call(call, lambda text: MARK + text) for call in calls]
    return marked


def mark_end(message: Json) -> Json:
    """Return a message with a mark behind its content, or behind the name of its last call."""
    if message.get("tool_calls"):
        *others, last = message["tool_calls"]
        return {**message, "tool_calls": [*others, _marked_call(last, lambda text: text + MARK)]}
    content = _marked_content(message.get("content"), -1, lambda text: text + MARK)
    return {**message, "content": content}


def _marked_content(content: Any, place: int, mark: Callable[[str], str]) -> Any:
    """Return a content with a mark in one of its texts."""
    texts = texts_of(content) or [""]
    texts[place] = mark(texts[place])
    return text_parts(texts) if isinstance(content, list) else texts[0]


def _marked_call(call: Json, mark: Callable[[str], str]) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "name": mark(function["name"])}}
