"""Render chat messages to the prompt text with the checkpoint's own Jinja template.

Templates are untrusted code. Processes with limits on memory and time compile and render them
(`server.text.template_sandbox`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from server.text import exact_json
from server.text.content_parts import (
    has_late_system,
    joined,
    reads_parts,
    text_parts,
    texts_of,
    with_system_first,
)

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateError(Exception):
    """The template refused the messages or failed on them. The client gets the text."""


class TemplateLimitError(TemplateError):
    """The template was over a limit on memory or time, or crashed."""


class Renderer(Protocol):
    """The processes that render one compiled template. Thread-safe."""

    def render(self, context: dict[str, Any]) -> dict[str, str]:
        """Return the `text`, or the `error` of the template. Raises TemplateLimitError."""

    async def in_thread(self, work: Callable[[], str]) -> str:
        """Run `work`, which calls `render`, in a thread."""

    def close(self) -> None:
        """End the processes. Idempotent."""


def _prepare(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as transformers prepares it for a template.

    Null fields are dropped, because templates would print them as "None"; but a null content stays,
    because templates test for it. The reasoning is stored under each name that templates read.
    """
    message = {k: value for k, value in message.items() if value is not None or k == "content"}
    reasoning = next((message[f] for f in REASONING_FIELDS if f in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class ChatTemplate:
    """The template of one checkpoint. Rendering is thread-safe.

    `variables` are the names that the template reads from its context. The template would silently
    ignore tools or template arguments that are not among them, so the caller can refuse those.
    `tool_use` is the template for chats with tools, if there is another one.
    """

    def __init__(
        self,
        source: str,
        special: dict[str, str],
        variables: frozenset[str],
        renderer: Renderer,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        self.source = source
        self.variables = variables
        self._tool_use = tool_use
        self._special_tokens = special
        self._renderer = renderer
        self._reads_parts: dict[str, bool] = {}  # by role, once it was tried
        self._wants_system_first: bool | None = None  # None: not tried

    @property
    def for_tools(self) -> ChatTemplate:
        """The template of chats with tools: the one named tool_use, else this one."""
        return self._tool_use or self

    @property
    def sources(self) -> str:
        """The texts of all templates that chats may use."""
        return self.source if self._tool_use is None else self.source + self._tool_use.source

    @property
    def has_tool_use(self) -> bool:
        """Whether chats with tools have a template of their own."""
        return self._tool_use is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text; wait for it. `render_async` does not block the event loop.

        Messages with `tools` are rendered by the template named tool_use, if there is one.
        With `continue_final_message` the prompt ends where the last message's content ends.

        If the template fails on tool calls, other forms of them are tried (`_variants`).

        Raises TemplateError
        - with the template's own message, if the template refuses the messages;
        - if the template fails, is over a limit of its process, or writes more than 64 Ki
          characters plus four times its input;
        - with `continue_final_message`, if the template does not render the last message's content
          unchanged and exactly once.
        """
        if self._tool_use is not None and kwargs.get("tools") is not None:
            return self._tool_use.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        if continue_final_message:
            marked, mark = _marked(messages)
            text = self.render(marked, add_generation_prompt=False, **kwargs)
            return _before(text, mark, texts_of(messages[-1]["content"])[-1])
        context = {
            "documents": None,
            "tools": None,
            **self._special_tokens,
            **kwargs,
            "messages": [_prepare(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        messages = context["messages"]
        try:
            return self._rendered(context)
        except TemplateLimitError:  # other forms would take as long
            raise
        except TemplateError as error:
            for other in _variants(messages):
                with contextlib.suppress(TemplateError):
                    return self._rendered({**context, "messages": other})
            raise error from None

    def _rendered(self, context: dict[str, Any]) -> str:
        answer = self._renderer.render(context)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._renderer.close()
        if self._tool_use is not None:
            self._tool_use.close()

    async def render_async(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return what `render` returns, without blocking the event loop.

        A content that is a list of text parts becomes one text if the template reads no lists.
        """
        template = self if options.get("tools") is None else self.for_tools
        render = partial(template._render_readable, messages, **options)
        return await template._renderer.in_thread(render)

    def _render_readable(self, messages: list[dict[str, Any]], **options: Any) -> str:
        if has_late_system(messages) and self.wants_system_first:
            messages = with_system_first(messages)
        readable = [self._with_readable_content(message) for message in messages]
        return self.render(readable, **options)

    @property
    def wants_system_first(self) -> bool:
        """Whether the template refuses or drops later system messages. Tries it once, and waits."""
        if self._wants_system_first is None:
            try:
                self._wants_system_first = wants_system_first(self.render)
            except TemplateLimitError:  # perhaps only this time
                return False
        return self._wants_system_first

    def _with_readable_content(self, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("content"), list) or self._reads_parts_of(message["role"]):
            return message
        return {**message, "content": joined(message["content"])}

    def _reads_parts_of(self, role: str) -> bool:
        """Return whether messages of this role may have a list of text parts; try it once."""
        if role not in self._reads_parts:
            try:
                self._reads_parts[role] = reads_parts(self.render, role)
            except TemplateLimitError:  # perhaps only this time
                return False
            except TemplateError:
                self._reads_parts[role] = False
        return self._reads_parts[role]


def wants_system_first(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Try whether a template shows system messages at the beginning of a chat only.

    Raises TemplateLimitError.
    """
    first, second = (secrets.token_hex(8) for _ in range(2))
    system = [{"role": "system", "content": text} for text in (first, second)]
    user, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}

    def shows(*messages: dict[str, Any]) -> bool:
        try:
            text = render(list(messages))
        except TemplateLimitError:
            raise
        except TemplateError:
            return False
        return first in text and second in text

    if shows(system[0], user, system[1]) and shows(user, *system, reply, user):
        return False
    return shows(*with_system_first([user, *system, reply, user]))


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield other forms of messages with tool calls, which some templates need.

    A content is an empty text instead of null, or the arguments are JSON texts, or both.
    """
    with_text = [{**m, "content": ""} if _is_null(m) else m for m in messages]
    with_json = [_with_json_arguments(message) for message in messages]
    if with_text != messages:
        yield with_text
    if with_json != messages:
        yield with_json
        if with_text != messages:
            yield [_with_json_arguments(message) for message in with_text]


def _is_null(message: dict[str, Any]) -> bool:
    return "content" in message and message["content"] is None


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as OpenAI's API has them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function["arguments"], dict):
            function = {**function, "arguments": exact_json.text(function["arguments"])}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with a random mark appended to the last one's content, and the mark."""
    *others, last = messages
    content = last.get("content")
    if not isinstance(content, str | list) or last.get("tool_calls"):
        raise TemplateError(
            "The last message cannot be continued: it must have text content and no tool_calls."
        )
    mark = f"END{secrets.token_hex(16)}"
    # A template that trims this space would also have trimmed the content.
    *before, final = texts_of(content)
    texts = [*before, f"{final}{mark} "]
    marked = text_parts(texts) if isinstance(content, list) else texts[0]
    return [*others, {**last, "content": marked}], mark


def _before(text: str, mark: str, content: str) -> str:
    """Return `text` up to `mark`, trimmed if the template trims the content."""
    shown, found, rest = text.rpartition(mark)
    if not found or mark in shown or not shown.rstrip().endswith(content.strip()):
        raise TemplateError(
            "The last message cannot be continued: the chat template does not render its content "
            "unchanged and exactly once."
        )
    return shown if rest.startswith(" ") else shown.rstrip()
