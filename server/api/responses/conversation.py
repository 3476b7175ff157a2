"""From items to the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.openai.schemas.chat import FunctionCall, ToolCall
from server.text.content_parts import content_of, joined

Json = dict[str, Any]
INSTRUCTING = ("system", "developer")


def messages_of(items: Sequence[Json], instructions: str | None) -> list[Json]:
    """Return the messages of a conversation; `items` are in their stored form.

    Many templates allow one system message only, and only at the beginning. So `instructions` and
    the system messages that follow them directly become one.
    """
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
            case "function_call":
                self._add_call(item)
            case "function_call_output":
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
        self._functions[item["call_id"]] = item["name"]
        function = FunctionCall(name=item["name"], arguments=item["arguments"])
        call = ToolCall(id=item["call_id"], type="function", function=function)
        self._assistant().setdefault("tool_calls", []).append(call.for_template())

    def _add_output(self, item: Json) -> None:
        output = item["output"]
        message = {
            "role": "tool",
            "content": output if isinstance(output, str) else _content(output),
            "tool_call_id": item["call_id"],
        }
        if item["call_id"] in self._functions:  # some templates show the name
            message["name"] = self._functions[item["call_id"]]
        self.messages.append(message)

    def _assistant(self, *absent: str) -> Json:
        """Return the assistant's last message, or a new one if that has a member of `absent`."""
        last: Json = self.messages[-1] if self.messages else {"role": None}
        if last["role"] != "assistant" or any(last.get(name) is not None for name in absent):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _content(parts: Sequence[Json]) -> str | list[Json]:
    """Return parts as a content for templates. One part is the same as a text in this API."""
    return content_of([part["refusal"] if "refusal" in part else part["text"] for part in parts])
