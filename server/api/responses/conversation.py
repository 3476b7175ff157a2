"""From items to the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.openai.schemas.tools import FunctionCall, ToolCall
from server.api.responses.offered import SEARCH, names_of, visible_name
from server.text.content_parts import content_with_images, image_part, joined, text_part
from server.text.tools import INPUT

Json = dict[str, Any]
INSTRUCTING = ("system", "developer")


def messages_of(items: Sequence[Json], instructions: str | None) -> list[Json]:
    """Return the messages of a conversation; `items` are in their stored form.

    Many templates allow one system message only, and only at the beginning. So `instructions` and
    the system messages that follow them directly become one.
    """
    items = [item for item in items if item["type"] != "additional_tools"]
    leading = 0
    while leading < len(items) and items[leading].get("role") in INSTRUCTING:
        leading += 1
    system = [_content(item["content"]) for item in items[:leading]]
    if instructions:
        system.insert(0, instructions)
    conversation = _Conversation()
    if system:
        content = system[0] if len(system) == 1 else "\n\n".join(map(joined, system))
        conversation.messages.append({"role": "system", "content": content})
    for item in items[leading:]:
        conversation.add(item)
    return conversation.finished()


class _Conversation:
    """Messages, where the items of one turn of the assistant are joined into one message."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._functions: dict[str, str] = {}  # names by call id

    def add(self, item: Json) -> None:
        match item["type"]:
            case "message":
                self._add_message(item)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call" | "custom_tool_call" | "tool_search_call":
                self._add_call(item)
            case "function_call_output" | "custom_tool_call_output" | "tool_search_output":
                self._add_output(item)

    def finished(self) -> list[Json]:
        """Return all messages. An assistant's content is None only if its calls say it all."""
        for message in self.messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return self.messages

    def _add_message(self, item: Json) -> None:
        content = _content(item["content"])
        if item["role"] == "assistant":  # the model wrote one text
            self._assistant("content", "tool_calls")["content"] = joined(content)
        else:
            self.messages.append({"role": item["role"], "content": content})

    def _add_reasoning(self, item: Json) -> None:
        """Add what the model thought. Other servers return a summary only."""
        text = joined(_content(item.get("content") or item["summary"]))
        if not text:
            return
        message = self._assistant("content", "tool_calls")
        earlier = message.get("reasoning_content")
        message["reasoning_content"] = f"{earlier}\n{text}" if earlier else text

    def _add_call(self, item: Json) -> None:
        call_id, name, arguments = _called(item)
        self._functions[call_id] = name
        function = FunctionCall(name=name, arguments=arguments)
        call = ToolCall(id=call_id, type="function", function=function)
        self._assistant().setdefault("tool_calls", []).append(call.for_template())

    def _add_output(self, item: Json) -> None:
        call_id = item["call_id"] or SEARCH
        message = {"role": "tool", "content": _result(item), "tool_call_id": call_id}
        if call_id in self._functions:  # some templates show the name
            message["name"] = self._functions[call_id]
        self.messages.append(message)

    def _assistant(self, *absent: str) -> Json:
        """Return the assistant's last message, or a new one if that has a member of `absent`."""
        last: Json = self.messages[-1] if self.messages else {"role": None}
        if last["role"] != "assistant" or any(last.get(name) is not None for name in absent):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _called(item: Json) -> tuple[str, str, str | Json]:
    """Return the id, the name and the arguments of a call, as the model has written them."""
    if item["type"] == "tool_search_call":
        return item["call_id"] or SEARCH, SEARCH, item["arguments"]
    arguments = {INPUT: item["input"]} if item["type"] == "custom_tool_call" else item["arguments"]
    return item["call_id"], visible_name(item["name"], item.get("namespace")), arguments


def _result(item: Json) -> str | list[Json]:
    """Return the result of a call as a content for templates."""
    if item["type"] == "tool_search_output":
        found = ", ".join(names_of(item["tools"]))
        return f"Found tools, which can be called now: {found}" if found else "Found no tools."
    output = item["output"]
    return output if isinstance(output, str) else _content(output, "input.output.input_image")


def _content(parts: Sequence[Json], name: str = "input.content.input_image") -> str | list[Json]:
    """Return parts as a content for templates. One part is the same as a text in this API."""
    return content_with_images([_part(part, name) for part in parts])


def _part(part: Json, name: str) -> Json:
    if part["type"] == "input_image":
        return image_part(part["image_url"], part["detail"], name)
    return text_part(part["refusal"] if "refusal" in part else part["text"])
