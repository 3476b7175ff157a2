"""Messages and tools of Ollama's API, and the conversation that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from server.api.openai.schemas.tools import MAX_TOOLS, FunctionDefinition
from server.generation.chat_prompt import Chat
from server.generation.thinking import Thinking
from server.http.body import JsonObject, Part, Text, small
from server.text.content_parts import image_part, text_part
from server.text.tools import NO_TOOLS, ToolUse

MAX_MESSAGES = 4096
MAX_IMAGES = 256  # of one message
Id = Annotated[str, StringConstraints(max_length=256)]
Images = Annotated[list[Text], Field(fail_fast=True, max_length=MAX_IMAGES)]
Json = dict[str, Any]


class OllamaFunction(Part):
    name: str
    """Name of the function."""
    arguments: JsonObject
    """An object, not its text."""
    index: int | None = None
    """No effect: calls are in the order of the list."""


class OllamaCall(Part):
    function: OllamaFunction
    """The function that was called."""
    id: Id | None = None
    """The id that a result may name."""
    type: Literal["function"] | None = None


class OllamaMessage(Part):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    """The text."""
    thinking: Text | None = None
    """The assistant's thoughts before its answer, if the template reads them."""
    images: Images | None = None
    """Pictures in base64, which the model sees before the text."""
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=128)] | None = None
    """The calls that the assistant made."""
    tool_name: Id | None = None
    """The tool whose result this is."""
    tool_call_id: Id | None = None
    """The call whose result this is. Without it, results are in the order of the calls."""


class OllamaTool(Part):
    type: Literal["function"] | None = None
    function: FunctionDefinition
    """The function."""


Messages = Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Tools = Annotated[
    list[OllamaTool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(small)
]


def chat_of(
    messages: Sequence[OllamaMessage], thinking: Thinking, tools: Sequence[OllamaTool] = ()
) -> Chat:
    """Return the conversation for the model's template.

    As in Ollama, the answer continues a last message of the assistant that has a text.
    """
    last = messages[-1]
    is_continued = last.role == "assistant" and bool(last.content) and not last.tool_calls
    use = ToolUse([each.function.tool() for each in tools]) if tools else NO_TOOLS
    return Chat(
        messages=template_messages(messages),
        arguments={},
        thinking=thinking,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        tool_use=use,
    )


def template_messages(messages: Sequence[OllamaMessage]) -> list[Json]:
    """Return messages as templates read them.

    Ollama's Python client drops the ids of calls, and templates need them. A call without an id
    gets one, and a result that names no call belongs to the first open call of its tool.
    """
    found = []
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for message in messages:
        shown: Json = {"role": message.role, "content": _content(message)}
        if message.thinking is not None:
            shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            # Templates distinguish a missing text from an empty one.
            shown["content"] = shown["content"] or None
            ids = [
                call.id or f"call{num_calls + place:05}"
                for place, call in enumerate(message.tool_calls)
            ]
            num_calls += len(ids)
            shown["tool_calls"] = [
                _call(call, call_id) for call, call_id in zip(message.tool_calls, ids, strict=True)
            ]
            names = [call.function.name for call in message.tool_calls]
            open_calls = list(zip(ids, names, strict=True))
        if message.role == "tool":
            shown |= _answered(message, open_calls)
        found.append(shown)
    return found


def _content(message: OllamaMessage) -> str | list[Json]:
    text = message.content or ""
    if not message.images:
        return text
    images = [
        image_part(f"data:;base64,{each}", None, "messages.images") for each in message.images
    ]
    return [*images, text_part(text)] if text else images


def _call(call: OllamaCall, call_id: str) -> Json:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call_id, "type": "function", "function": function}


def _answered(result: OllamaMessage, open_calls: list[tuple[str, str]]) -> Json:
    """Return the call that a result belongs to, and remove it from the open ones."""
    for call in open_calls:
        call_id, name = call
        is_meant = result.tool_call_id == call_id
        if result.tool_call_id is None:
            is_meant = result.tool_name in (None, name)
        if is_meant:
            open_calls.remove(call)
            return {"tool_call_id": call_id, "name": name}
    given = {"tool_call_id": result.tool_call_id, "name": result.tool_name}
    return {name: value for name, value in given.items() if value is not None}
