"""Warnings about the prompt of a chat: mistakes that raise no error but lead to bad answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from server.generation.chat_prompt import Chat, template_of, unread_arguments
from server.state import AppState
from server.text.content_parts import texts_of
from server.text.tokenizer import Tokenizer

MAX_WARNINGS = 32
MAX_SEARCHES = 64  # of the whole prompt
SYSTEM_ROLES = ("system", "developer")
SYSTEM_ROLE = re.compile("""(['"])system\\1""")  # as templates compare and write it
END_OF_THOUGHT = "</think>"  # templates commonly drop the thoughts of earlier answers


@dataclass(frozen=True)
class PromptWarning:
    """`code` is stable, `message` is for people, and `param` names the field of the request."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class RenderedChat:
    """A chat, and the prompt that it became."""

    chat: Chat
    text: str
    token_ids: Sequence[int]


def lint(state: AppState, rendered: RenderedChat) -> list[PromptWarning]:
    """Return what is suspicious about a prompt; at most MAX_WARNINGS."""
    return list(islice(_warnings(state, rendered), MAX_WARNINGS))


def _warnings(state: AppState, rendered: RenderedChat) -> Iterator[PromptWarning]:
    yield from _length_warnings(state, rendered)
    yield from _start_warnings(state.tokenizer, rendered)
    yield from _end_warnings(rendered)
    yield from _role_warnings(state, rendered.chat)
    for name in unread_arguments(state, rendered.chat):
        message = f"The chat template does not read the argument {name}."
        yield PromptWarning("unread_argument", message, f"chat_template_kwargs.{name}")
    yield from _tool_warnings(rendered)
    yield from _message_warnings(rendered)
    yield from _special_token_warnings(state.tokenizer, rendered.chat)


def _length_warnings(state: AppState, rendered: RenderedChat) -> Iterator[PromptWarning]:
    longest = state.max_length()
    count = len(rendered.token_ids)
    if count > longest:
        message = f"The prompt has {count} tokens; the context has {longest}."
        param = "messages" if rendered.chat.messages else "prompt"
        yield PromptWarning("context_length_exceeded", message, param)


def _start_warnings(tokenizer: Tokenizer, rendered: RenderedChat) -> Iterator[PromptWarning]:
    """Yield warnings about the BOS token, which must come exactly once if the model has one."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    if list(rendered.token_ids[:2]) == [bos, bos]:
        yield PromptWarning("two_bos", "The prompt begins with two BOS tokens.")
    elif tokenizer.begins_with_bos and list(rendered.token_ids[:1]) != [bos]:
        message = "The prompt does not begin with BOS; other texts of this tokenizer do."
        yield PromptWarning("no_bos", message)


def _end_warnings(rendered: RenderedChat) -> Iterator[PromptWarning]:
    if rendered.text.endswith((" ", "\t")):
        message = (
            "The prompt ends with a space. Tokens of words usually contain the space before them, "
            "so the answer may begin badly."
        )
        yield PromptWarning("trailing_space", message)


def _role_warnings(state: AppState, chat: Chat) -> Iterator[PromptWarning]:
    """Yield a warning if a chat lacks the system message that its template can show."""
    template = template_of(state, chat)
    if template is None or not chat.messages:
        return
    has_system = any(message["role"] in SYSTEM_ROLES for message in chat.messages)
    if not has_system and SYSTEM_ROLE.search(template.source):
        message = "The chat has no system message; the chat template has a place for one."
        yield PromptWarning("no_system_message", message, "messages")


def _tool_warnings(rendered: RenderedChat) -> Iterator[PromptWarning]:
    tool_use = rendered.chat.tool_use
    if tool_use.mode == "none":
        return
    missing = [tool.name for tool in tool_use.tools if tool.name not in rendered.text]
    if missing:
        message = f"The prompt does not contain the tools {', '.join(missing)}."
        yield PromptWarning("tools_not_shown", message, tool_use.param)


class PromptSearch:
    """Finds texts in a prompt that mostly come in its order.

    All searches together then take one pass. MAX_SEARCHES may fail or go back; after that, every
    text counts as shown.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._position = 0
        self._left = MAX_SEARCHES

    def shows(self, text: str) -> bool:
        """Return whether the prompt has `text`, perhaps trimmed or as a part of a JSON string."""
        if self._left == 0:
            return True
        text = text.strip()
        forms = {text, *(json.dumps(text, ensure_ascii=escaped)[1:-1] for escaped in (False, True))}
        places = [self._prompt.find(form, self._position) for form in forms]
        if max(places) >= 0:
            self._position = min(place for place in places if place >= 0)
            return True
        self._left -= 1
        return any(form in self._prompt for form in forms)


def _message_warnings(rendered: RenderedChat) -> Iterator[PromptWarning]:
    """Yield warnings about parts of messages that the prompt does not contain."""
    search = PromptSearch(rendered.text)
    for index, message in enumerate(rendered.chat.messages):
        param = f"messages.{index}"
        role = message["role"]
        reasoning = message.get("reasoning_content") or ""
        if not search.shows(reasoning):
            text = "The prompt does not contain the reasoning of this message."
            yield PromptWarning("reasoning_not_shown", text, f"{param}.reasoning_content")
        texts = _written_texts(message)
        if not all(search.shows(text.rpartition(END_OF_THOUGHT)[2]) for text in texts):
            is_system = role in SYSTEM_ROLES
            code = "system_message_dropped" if is_system else "content_not_shown"
            text = f"The prompt does not contain the content of this {role} message unchanged."
            yield PromptWarning(code, text, f"{param}.content")
        for number, call in enumerate(message.get("tool_calls") or ()):
            if not search.shows(call["function"]["name"]):
                text = "The prompt does not contain this tool call."
                yield PromptWarning("tool_call_not_shown", text, f"{param}.tool_calls.{number}")


def _special_token_warnings(tokenizer: Tokenizer, chat: Chat) -> Iterator[PromptWarning]:
    """Yield warnings about contents that the model reads as control tokens."""
    for index, message in enumerate(chat.messages):
        text = "\n".join(_written_texts(message))
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = next((token for token in ids if token in tokenizer.special_ids), None)
        if found is not None:
            text = f"The content has the special token {tokenizer.vocabulary_entry(found)}."
            yield PromptWarning("special_token_in_content", text, f"messages.{index}.content")


def _written_texts(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message, without the markers of its images."""
    content = message.get("content")
    if isinstance(content, list):
        content = [part for part in content if part["type"] != "image"]
    return texts_of(content)
