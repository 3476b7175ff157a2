"""Output: the items of an answer as they grow, and the stream events that describe them.

A stream sends the events. A whole answer has the items that are left after the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server.api.responses.ids import output_item_id
from server.api.responses.offered import Called
from server.api.responses.open_call import ITEM_TYPES, Json, OpenCall, item_done
from server.generation.events import (
    ChoiceEvents,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenWithLogprobs,
    ToolCallDelta,
)

NO_NAMES: Mapping[str, Called] = {}
ItemStatus = Literal["completed", "incomplete"]
FormatLogprobs = Callable[[Sequence[TokenWithLogprobs]], list[Json]]


@dataclass(frozen=True, slots=True)
class TextKind:
    """The names of an item with one text, and its constant fields."""

    events: str  # what the names of its events begin with
    item: Json
    part: Json
    has_logprobs: bool


MESSAGE = TextKind(
    events="response.output_text",
    item={"type": "message", "role": "assistant"},
    part={"type": "output_text", "annotations": []},
    has_logprobs=True,
)
REASONING = TextKind(
    events="response.reasoning_text",
    item={"type": "reasoning", "summary": []},
    part={"type": "reasoning_text"},
    has_logprobs=False,
)


@dataclass(slots=True)
class OpenText:
    """A message or a reasoning item that still grows."""

    kind: TextKind
    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def opening(self) -> list[Json]:
        """Return the events that begin the item."""
        item = self._item("in_progress", [])
        added = {"type": "response.output_item.added", "output_index": self.index, "item": item}
        return [added, self._event("response.content_part.added", {"part": self._part()})]

    def delta(self, text: str, logprobs: list[Json]) -> Json:
        """Add a text, and return its event."""
        self.texts.append(text)
        self.logprobs += logprobs
        fields = {"delta": text, **self._logprobs_field(logprobs)}
        return self._event(f"{self.kind.events}.delta", fields)

    def closing(self, status: ItemStatus) -> list[Json]:
        """Return the events that end the item."""
        part = self._part()
        fields = {"text": part["text"], **self._logprobs_field(self.logprobs)}
        return [
            self._event(f"{self.kind.events}.done", fields),
            self._event("response.content_part.done", {"part": part}),
            item_done(self.index, self._item(status, [part])),
        ]

    def item(self, status: ItemStatus) -> Json:
        """Return the item as it is now."""
        return self._item(status, [self._part()])

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.id, "status": status, **self.kind.item, "content": content}

    def _part(self) -> Json:
        text = "".join(self.texts)
        return {**self.kind.part, "text": text, **self._logprobs_field(self.logprobs)}

    def _logprobs_field(self, logprobs: list[Json]) -> Json:
        return {"logprobs": list(logprobs)} if self.kind.has_logprobs else {}

    def _event(self, name: str, fields: Json) -> Json:
        """Return an event about the one content part."""
        place = {"item_id": self.id, "output_index": self.index, "content_index": 0}
        return {"type": name, **place, **fields}


OpenItem = OpenText | OpenCall


class Output:
    """The items of one response. Only the last one grows."""

    def __init__(
        self,
        response_id: str,
        format_logprobs: FormatLogprobs,
        called: Mapping[str, Called] = NO_NAMES,
    ) -> None:
        self._response_id = response_id
        self._format_logprobs = format_logprobs
        self._called = called
        self._done: list[Json] = []
        self._open: OpenItem | None = None
        # Logprobs of tokens without a text yet, such as the first bytes of a character.
        self._waiting: list[TokenWithLogprobs] = []
        self.finish: FinishReason | None = None

    def add(self, update: ChoiceEvents) -> Iterator[Json]:
        """Yield the stream events that the events make."""
        for event in update.events:
            match event:
                case ReasoningDelta(text=text) if text:
                    yield from self._add_reasoning(text)
                case TextDelta():
                    yield from self._add_text(event)
                case ToolCallDelta():
                    yield from self._add_call(event)
                case Finish():
                    yield from self._finish(event.reason)

    def items(self) -> list[Json]:
        """Return the items so far. One that still grows is incomplete."""
        if self._open is None:
            return self._done
        return [*self._done, self._open.item("incomplete")]

    def _add_reasoning(self, text: str) -> Iterator[Json]:
        reasoning = self._open_text(REASONING)
        if reasoning is None:
            yield from self._close("completed")
            reasoning = OpenText(REASONING, self._next_id("reasoning"), len(self._done))
            yield from self._begin(reasoning)
        yield reasoning.delta(text, [])

    def _add_text(self, event: TextDelta) -> Iterator[Json]:
        self._waiting += event.logprobs
        message = self._open_text(MESSAGE)
        if message is None:
            if not event.text:
                return
            yield from self._close("completed")
            message = OpenText(MESSAGE, self._next_id("message"), len(self._done))
            yield from self._begin(message)
        logprobs = self._format_logprobs(self._waiting)
        self._waiting = []
        if event.text or logprobs:
            yield message.delta(event.text, logprobs)

    def _add_call(self, event: ToolCallDelta) -> Iterator[Json]:
        if event.id is not None:
            yield from self._close("completed")
            name = event.name or ""
            called = self._called.get(name, Called("function", name))
            item_id = self._next_id(ITEM_TYPES[called.kind])
            yield from self._begin(OpenCall(item_id, len(self._done), event.id, called))
        assert isinstance(self._open, OpenCall)
        if event.arguments:
            yield from self._open.delta(event.arguments)

    def _finish(self, reason: FinishReason) -> Iterator[Json]:
        self.finish = reason
        if self._open is None and not self._done:  # clients expect a message, also an empty one
            yield from self._begin(OpenText(MESSAGE, self._next_id("message"), 0))
        yield from self._close("incomplete" if reason == "length" else "completed")

    def _open_text(self, kind: TextKind) -> OpenText | None:
        """Return the item that grows, if it is of this kind."""
        if isinstance(self._open, OpenText) and self._open.kind is kind:
            return self._open
        return None

    def _begin(self, item: OpenItem) -> list[Json]:
        self._open = item
        return item.opening()

    def _close(self, status: ItemStatus) -> list[Json]:
        """Return the events that end the item that grows, if there is one."""
        if self._open is None:
            return []
        events = self._open.closing(status)
        self._done.append(self._open.item(status))
        self._open = None
        return events

    def _next_id(self, kind: str) -> str:
        return output_item_id(self._response_id, kind, len(self._done))
