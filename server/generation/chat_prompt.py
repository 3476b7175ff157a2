"""Chats as prompts: rendered by the model's template and tokenised."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive

from server.generation.off_loop import off_loop
from server.generation.prompts import encode_prompt
from server.generation.thinking import DEFAULT_THINKING, Thinking
from server.generation.tool_prompt import functions_text, with_tools_in_text
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import unsupported
from server.state import AppState
from server.text.chat_template import ChatTemplate
from server.text.content_parts import ChatImages, joined, shows_images
from server.text.tokenizer import without_breaks
from server.text.tools import NO_TOOLS, Tool, ToolUse


@dataclass(frozen=True)
class Chat:
    """A conversation, and how the model's template renders it."""

    messages: list[dict[str, Any]]  # as templates read them; `content` is a text or text parts
    arguments: dict[str, Any]  # of the template, as the request gives them
    thinking: Thinking = DEFAULT_THINKING
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # None: special tokens are added unless the template writes them.
    add_special_tokens: bool | None = None
    tool_use: ToolUse = NO_TOOLS
    images: ChatImages | None = None  # once they are read


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as the model reads it."""

    text: str
    ids: list[int]


async def chat_prompt(state: AppState, chat: Chat) -> ChatPrompt:
    """Return the prompt of a chat.

    Raises TemplateError, or a 400 ApiError if the model cannot read such a chat or if it is longer
    than the context.
    """
    text = await chat_text(state, chat)
    add = adds_special_tokens(state, chat)
    num_image_tokens = 0 if chat.images is None else chat.images.num_tokens

    def encode() -> list[int]:
        return encode_prompt(
            state, text, "messages", add_special_tokens=add, num_image_tokens=num_image_tokens
        )

    ids = await off_loop(len(text), encode)
    return ChatPrompt(without_breaks(text), ids)


async def with_images(state: AppState, chat: Chat, param: str, receive: Receive) -> Chat:
    """Return a chat whose images are read; its messages hold a marker for each.

    `param` names the field of the messages. Raises a 400 or 503 ApiError, or ClientGone if the
    client of `receive` disconnects meanwhile.
    """
    reading = state.read_images(chat.messages, param)
    if shows_images(chat.messages):
        images = await cancel_on_disconnect(receive, reading)
    else:
        images = await reading
    return replace(chat, messages=images.messages, images=images)


async def chat_text(state: AppState, chat: Chat) -> str:
    """Return the prompt text of a chat; raises as `chat_prompt` does."""
    text = source_text(chat) if _is_source(state) else await render(state, chat)
    return text if chat.images is None else chat.images.expanded(text)


def adds_special_tokens(state: AppState, chat: Chat) -> bool:
    """Return whether the tokenizer adds special tokens to the text of `chat`.

    A template writes them itself. Adding them again would double the BOS token.
    """
    if chat.add_special_tokens is None:
        return _is_source(state)
    return chat.add_special_tokens


def _is_source(state: AppState) -> bool:
    """Return whether the model is an encoder–decoder that reads one message as it is."""
    return state.template is None and state.start_token is not None


def source_text(chat: Chat) -> str:
    """Return the one user message that an encoder–decoder without a chat template reads."""
    roles = [message["role"] for message in chat.messages]
    if roles != ["user"]:
        given = ", ".join(roles)
        message = f"This model has no chat template: it reads one user message, not {given}."
        raise unsupported("messages", message)
    message = "This model has no chat template, so nothing is added."
    if not chat.add_generation_prompt:
        raise unsupported("add_generation_prompt", message)
    if chat.continue_final_message:
        raise unsupported("continue_final_message", message)
    return joined(chat.messages[0]["content"])


async def render(state: AppState, chat: Chat) -> str:
    """Return the text that the model's template makes of a chat."""
    template = template_of(state, chat)
    if template is None:
        message = "This model has no chat template; use /v1/completions or --chat-template."
        raise unsupported("messages", message)
    messages = [_with_known_role(message) for message in chat.messages]
    arguments = thinking_of(state, chat).arguments(template, chat.arguments)
    if state.answers is not None and state.answers.shows_one_call:
        messages = with_single_calls(messages)
    tools = _visible_tools(chat)
    if shows_tools_in_text(state, chat):
        messages = with_tools_in_text(messages, tools)
        tools = ()
    elif tools:
        arguments = {**arguments, "tools": [tool.for_template for tool in tools]}
    if "functions" in template.variables:
        arguments = {"functions": functions_text(tools), **arguments}
    return await template.render_async(
        messages,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **arguments,
    )


def thinking_of(state: AppState, chat: Chat) -> Thinking:
    """Return how the model thinks: as the request says, else as --reasoning says."""
    wanted = state.config.reasoning
    if wanted == "auto" or chat.thinking.turns_on is not None:
        return chat.thinking
    return replace(chat.thinking, is_on=wanted == "on")


def template_of(state: AppState, chat: Chat) -> ChatTemplate | None:
    """Return the template that renders a chat."""
    if state.template is None or not _visible_tools(chat) or shows_tools_in_text(state, chat):
        return state.template
    return state.template.for_tools


def _visible_tools(chat: Chat) -> Sequence[Tool]:
    return () if chat.tool_use.mode == "none" else chat.tool_use.tools


def shows_tools_in_text(state: AppState, chat: Chat) -> bool:
    """Return whether the system message shows the tools, because the template does not."""
    return state.template is not None and bool(_visible_tools(chat)) and not has_own_tools(state)


def has_own_tools(state: AppState) -> bool:
    """Return whether the model's template shows tools.

    A template for all chats counts only if the format of its calls is known. One that is named
    tool_use is for nothing else.
    """
    template = state.template
    if template is None or not {"tools", "functions"} & template.for_tools.variables:
        return False
    is_known = state.answers is not None and state.answers.calls_name is not None
    return template.has_tool_use or is_known


def with_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of one call each, with the result of a call behind it."""
    split: list[dict[str, Any]] = []
    unread = list(messages)
    while unread:
        message = unread.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            split.append(message)
            continue
        results = list(itertools.takewhile(lambda each: each["role"] == "tool", unread))
        del unread[: len(results)]
        for index, call in enumerate(calls):
            rest = message if index == 0 else {"role": message["role"], "content": ""}
            split.append({**rest, "tool_calls": [call]})
            is_last = index == len(calls) - 1
            of_call = [each for each in results if is_last or _answers(each, call)]
            split += of_call
            results = [each for each in results if each not in of_call]
    return split


def _answers(result: dict[str, Any], call: dict[str, Any]) -> bool:
    return bool(result.get("tool_call_id") == call.get("id"))


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the role "system" for OpenAI's "developer"."""
    if message["role"] == "developer":
        return {**message, "role": "system"}
    return message


def can_limit_thoughts(state: AppState) -> bool:
    """Return whether the model marks its thoughts, so that their tokens can be limited."""
    return state.answers is not None and state.answers.limit_thoughts is not None


def unread_arguments(state: AppState, chat: Chat) -> list[str]:
    """Return the names of template arguments, and fields for them, that the template ignores."""
    template = template_of(state, chat)
    names = list(chat.arguments)
    if template is not None:
        names = [name for name in names if name not in template.variables]
    is_limited = can_limit_thoughts(state)
    unfollowed = chat.thinking.ignored(template, chat.arguments, is_limited=is_limited)
    unread = () if chat.images is None else chat.images.unread
    return list(dict.fromkeys([*names, *unfollowed, *unread]))
