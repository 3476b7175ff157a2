"""A call of a tool as an item that grows, and the stream events that describe it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from server.api.responses.offered import Called, Kind
from server.text import exact_json

Json = dict[str, Any]
ITEM_TYPES: dict[Kind, str] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "tool_search": "tool_search_call",
}
# The member with what the model writes, and the beginning of the names of its events.
WRITTEN: dict[Kind, tuple[str, str]] = {
    "function": ("arguments", "response.function_call_arguments"),
    "custom": ("input", "response.custom_tool_call_input"),
}


@dataclass(slots=True)
class OpenCall:
    """A call whose arguments, or whose input, still grow."""

    id: str
    index: int
    call_id: str
    called: Called
    texts: list[str] = field(default_factory=list)

    def opening(self) -> list[Json]:
        """Return the events that begin the item."""
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    def delta(self, text: str) -> list[Json]:
        """Add a part of the arguments, and return its events. A search has none."""
        self.texts.append(text)
        if self.called.kind not in WRITTEN:
            return []
        _, name = WRITTEN[self.called.kind]
        return [self._event(f"{name}.delta", {"delta": text})]

    def closing(self, status: str) -> list[Json]:
        """Return the events that end the item."""
        item = self.item(status)
        ended = item_done(self.index, item)
        if self.called.kind not in WRITTEN:
            return [ended]
        member, name = WRITTEN[self.called.kind]
        fields = {member: item[member]}
        if self.called.kind == "function":
            fields = {"name": self.called.name, **fields}
        return [self._event(f"{name}.done", fields), ended]

    def item(self, status: str) -> Json:
        """Return the item as it is now."""
        kind = self.called.kind
        text = "".join(self.texts)
        item = {"id": self.id, "status": status, "type": ITEM_TYPES[kind], "call_id": self.call_id}
        if kind not in WRITTEN:
            return {**item, "execution": "client", "arguments": _object(text)}
        item |= {"name": self.called.name, WRITTEN[kind][0]: text}
        if self.called.namespace is not None:
            item["namespace"] = self.called.namespace
        return item

    def _event(self, name: str, fields: Json) -> Json:
        return {"type": name, "item_id": self.id, "output_index": self.index, **fields}


def _object(text: str) -> Json:
    """Return arguments as an object, which is empty until they are whole."""
    try:
        value = exact_json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def item_done(index: int, item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": item}
