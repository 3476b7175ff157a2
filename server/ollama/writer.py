"""Writers of Ollama's answers: the events of one choice become lines, or one object."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.openai.logprobs import chat_logprobs
from server.generation.events import (
    ChoiceEvents,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenWithLogprobs,
    ToolCallDelta,
    Usage,
)
from server.generation.prepare import PreparedRequest
from server.http.errors import ApiError
from server.ollama.lines import line, nanoseconds, now
from server.text import exact_json
from server.text.tokenizer import Tokenizer

PATH = "/api/chat"
Json = dict[str, Any]


@dataclass
class Part:
    """A part of an answer, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[TokenWithLogprobs] = field(default_factory=list)

    def add(self, other: Part) -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


class OpenCall:
    """The call that the model is writing. Ollama's clients get whole calls only."""

    def __init__(self) -> None:
        self._first: ToolCallDelta | None = None
        self._arguments = ""

    def push(self, delta: ToolCallDelta) -> list[Json]:
        """Add a part; return the call before it, if a new one begins."""
        ended = []
        if delta.name is not None:
            ended = self.close()
            self._first = delta
        self._arguments += delta.arguments
        return ended

    def close(self) -> list[Json]:
        """Return the call, in a list that is empty if there is none.

        A call that was cut is left out: clients run every call, and its arguments are no object.
        """
        first, text = self._first, self._arguments
        self._first = None
        self._arguments = ""
        if first is None:
            return []
        try:
            arguments = exact_json.loads(text)
        except json.JSONDecodeError:
            return []
        if not isinstance(arguments, dict):
            return []
        function = {"index": first.index, "name": first.name, "arguments": arguments}
        return [{"id": first.id, "function": function}]


class LinesWriter:
    """Writes the answers of /api/chat. The interface is `server.generation.writer.Writer`."""

    def __init__(self, tokenizer: Tokenizer, prepared: PreparedRequest) -> None:
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._call = OpenCall()
        self._finish: Finish | None = None
        self._durations: Json = {}

    def opening(self) -> bytes:
        return b""

    def chunks(self, update: ChoiceEvents) -> bytes:
        parts = self._parts(update)
        return b"".join([line({**self._fields(part), "done": False}) for part in parts])

    def ping(self) -> bytes:
        """Return a line without text: this format has no comments. The space marks it as a ping."""
        return b" " + line({**self._fields(Part()), "done": False})

    def closing(self, usage: Usage) -> bytes:
        return line(self._fields(Part()) | self._ending(usage))

    def failure(self, error: ApiError) -> bytes:
        return error.body(self._prepared.request_id, PATH) + b"\n"

    def whole(self, answers: Sequence[ChoiceEvents], usage: Usage) -> bytes:
        [answer] = answers
        found = Part()
        for part in self._parts(answer):
            found.add(part)
        return exact_json.dumps(self._fields(found) | self._ending(usage))

    def content(self, part: Part) -> Json:
        """Return the fields that have the text."""
        message: Json = {"role": "assistant", "content": part.text}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            message["tool_calls"] = part.calls
        return {"message": message}

    def _fields(self, part: Part) -> Json:
        """Return the fields of every line."""
        fields = {"model": self._prepared.model, "created_at": now(), **self.content(part)}
        if part.logprobs:
            fields["logprobs"] = chat_logprobs(self._tokenizer, part.logprobs)["content"]
        return fields

    def _parts(self, update: ChoiceEvents) -> Iterator[Part]:
        """Yield the parts that the events make, without empty ones."""
        for event in update.events:
            yield from self._parts_of(event)
        timings = update.timings
        if timings is not None:
            self._durations = {
                "load_duration": nanoseconds(timings.queue_ms),
                "prompt_eval_duration": nanoseconds(timings.prompt_ms),
                # Clients divide by it.
                "eval_duration": max(nanoseconds(timings.generation_ms), 1),
            }

    def _parts_of(self, event: Event) -> Iterator[Part]:
        match event:
            case TextDelta(text=text, logprobs=logprobs):
                calls = self._call.close() if text else []
                if text or logprobs:
                    yield Part(text, calls=calls, logprobs=list(logprobs))
            case ReasoningDelta(text=text):
                if text:
                    yield Part(thinking=text, calls=self._call.close())
            case ToolCallDelta():
                if calls := self._call.push(event):
                    yield Part(calls=calls)
            case Finish():
                self._finish = event
                if calls := self._call.close():
                    yield Part(calls=calls)

    def _ending(self, usage: Usage) -> Json:
        """Return the fields of the last line, with times in nanoseconds.

        `load_duration` is the wait in the queue: the model is loaded.
        """
        is_cut = self._finish is not None and self._finish.reason == "length"
        total = round((time.monotonic() - self._prepared.arrival) * 1e9)
        return {
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": total,
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
            **self._durations,
        }


class GenerateWriter(LinesWriter):
    """Writes the answers of /api/generate."""

    def content(self, part: Part) -> Json:
        fields: Json = {"response": part.text}
        if part.thinking:
            fields["thinking"] = part.thinking
        return fields
