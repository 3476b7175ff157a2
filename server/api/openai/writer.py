"""Writers of OpenAI's two APIs: their common part, and text_completion objects.

They have vLLM's fields, too. Each event becomes a `Part` of its choice. A stream sends the parts
one by one. The whole answer is all of them joined, as OpenAI's clients join the chunks of a stream.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from server.api.openai.logprobs import (
    completion_logprobs,
    echoed_tokens,
    id_name,
    prompt_logprobs_by_id,
)
from server.api.openai.schemas.generate import GenerateBody
from server.api.openai.timings import metrics_field, timing_fields
from server.generation.events import (
    ChoiceEvents,
    Event,
    Finish,
    FinishReason,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenWithLogprobs,
    ToolCallDelta,
    Usage,
)
from server.generation.prepare import PreparedRequest
from server.generation.sse import escaped, sse_event
from server.generation.writer import PING
from server.http.errors import ApiError
from server.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
MARK = "\N{WHITE SQUARE}text"  # stands for a text in a chunk that is encoded once
Json = dict[str, Any]


def joined(first: Any, second: Any) -> Any:
    """Return two JSON values as one: texts and lists appended, objects joined name by name."""
    if first is None:
        return second
    if second is None:
        return first
    if isinstance(first, dict):
        return first | {name: joined(first.get(name), value) for name, value in second.items()}
    return first + second


@dataclass(slots=True)
class Part:
    """A part of one choice, or several parts joined. None: not requested, or not in this part."""

    content: Json
    logprobs: Json | None = None
    token_ids: Sequence[int] | None = None
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether a stream can leave the part out."""
        if self.finish_reason is not None or self.token_ids is not None:
            return False
        if self.logprobs is not None and any(self.logprobs.values()):
            return False
        return not any(self.content.values())

    def __add__(self, following: Part) -> Part:
        return Part(
            content=joined(self.content, following.content),
            logprobs=joined(self.logprobs, following.logprobs),
            token_ids=joined(self.token_ids, following.token_ids),
            finish_reason=joined(self.finish_reason, following.finish_reason),
        )


class OpenAIWriter:
    """The common parts of both writers. The interface is `server.generation.writer.Writer`.

    Subclasses override the small methods at the end, and add the fields about the prompt.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]  # `object` of a whole answer
    chunk_object: ClassVar[str]  # `object` of a chunk

    def __init__(
        self,
        tokenizer: Tokenizer,
        prepared: PreparedRequest,
        body: GenerateBody,
        *,
        names_ids: bool = False,
    ) -> None:
        """`names_ids`: tokens in `logprobs` are named by their ids, unless the body says no."""
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._body = body
        self._id = self.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())
        self._prompt_tokens = sum(map(len, prepared.prompts))
        self._num_tokens = 0  # generated and written so far, in all choices
        asked = body.return_tokens_as_token_ids
        self._token_name = id_name if (names_ids if asked is None else asked) else None
        self._text_chunks: dict[int, tuple[bytes, bytes]] = {}  # by index: before and after a text
        plain = prepared.options.num_logprobs < 0 and not body.return_token_ids
        self._has_plain_texts = plain and not body.continuous_usage

    # Bytes

    def chunks(self, update: ChoiceEvents) -> bytes:
        chunks = b""
        if self._has_plain_texts and len(update.events) == 1 and update.timings is None:
            (event,) = update.events
            if isinstance(event, TextDelta):
                return self._plain_text(update.index, event.text)
        for event in update.events:
            if isinstance(event, TextDelta):
                self._num_tokens += len(event.token_ids)
        parts = [part for part in self._parts(update) if not part.is_empty]
        for part in parts:
            chunks += self._first_chunk(update.index, part)
            more: Json = {}
            if update.timings is not None and part is parts[-1]:
                more["timings"] = timing_fields(update.timings)
            chunks += self._chunk([self._delta_entry(update.index, part)], **more)
        return chunks

    def _plain_text(self, index: int, text: str) -> bytes:
        """Return a chunk that differs from others only in its text."""
        if not text:
            return b""
        first = b""
        ends = self._text_chunks.get(index)
        if ends is None:
            part = Part(self._text_content(MARK))
            first = self._first_chunk(index, part)
            chunk = self._chunk([self._delta_entry(index, part)])
            before, _, after = chunk.partition(orjson.dumps(MARK))
            ends = self._text_chunks[index] = before, after
        return first + ends[0] + escaped(orjson.dumps(text)) + ends[1]

    def ping(self) -> bytes:
        return PING

    def closing(self, usage: Usage) -> bytes:
        if not self._body.include_usage:
            return DONE
        return self._chunk([], **self._usage_fields(usage)) + DONE

    def _usage_fields(self, usage: Usage) -> Json:
        """Return the fields of a stream's last chunk."""
        return {"usage": usage_fields(usage), **metrics_field(usage)}

    def failure(self, error: ApiError) -> bytes:
        return sse_event(error.body(self._prepared.request_id))

    def whole(self, answers: Sequence[ChoiceEvents], usage: Usage) -> bytes:
        body = self._head(self.whole_object)
        body["choices"] = [self._answer(answer) for answer in answers]
        body["usage"] = usage_fields(usage)
        if answers[0].timings is not None:
            body["timings"] = timing_fields(answers[0].timings)
        body |= metrics_field(usage)
        return orjson.dumps(body | self._whole_fields(answers))

    def _chunk(self, choices: Sequence[Json], **more: Any) -> bytes:
        """Return the event of one chunk."""
        chunk = self._head(self.chunk_object)
        chunk["choices"] = choices
        if self._body.continuous_usage:
            chunk["usage"] = self._usage_so_far()
        elif self._body.include_usage:
            chunk["usage"] = None
        chunk.update(more)
        return sse_event(orjson.dumps(chunk))

    def _usage_so_far(self) -> Json:
        """Return `usage` of a stream that goes on. It may not know the cached tokens yet."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._prompt_tokens + self._num_tokens,
        }

    def _head(self, kind: str) -> Json:
        """Return the first fields of every object."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._prepared.model,
            "system_fingerprint": self._prepared.fingerprint,
        }

    # Choices

    def _answer(self, answer: ChoiceEvents) -> Json:
        """Return one of `choices` of a whole answer: all parts of its stream, joined."""
        whole = Part(self._opening_content())
        for part in self._parts(answer):
            whole += part
        return self._entry(answer.index, self._message(whole.content), whole)

    def _delta_entry(self, index: int, part: Part) -> Json:
        """Return one of `choices` of a chunk."""
        return self._entry(index, self._delta(part.content), part)

    def _entry(self, index: int, content: Json, part: Part) -> Json:
        entry = {
            "index": index,
            **content,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
        }
        if part.token_ids is not None:
            entry["token_ids"] = part.token_ids
        return entry

    def _prompt_fields(self, index: int, events: Sequence[Event] = ()) -> Json:
        """Return the requested fields about the prompt of a choice."""
        fields: Json = {}
        ids = self._prepared.prompts[self._prepared.prompt_of(index)]
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = ids
        count = int(self._body.prompt_logprobs or 0)
        for event in events:
            if isinstance(event, PromptLogprobs) and self._body.asks_prompt_logprobs:
                logprobs = prompt_logprobs_by_id(self._tokenizer, ids, event.logprobs, count)
                fields["prompt_logprobs"] = logprobs
        return fields

    # Events

    def _parts(self, update: ChoiceEvents) -> Iterator[Part]:
        """Yield the parts of a choice that the events make."""
        echoed: Sequence[TokenWithLogprobs] = ()
        for event in update.events:
            match event:
                case PromptLogprobs():
                    echoed = self._echoed_tokens(update.index, event)
                case TextDelta():
                    yield self._text_part(event, echoed)
                case ReasoningDelta():
                    yield Part(self._reasoning_content(event.text))
                case ToolCallDelta():
                    yield Part(self._call_content(event))
                case Finish():
                    reason = self._finish_reason(event.reason)
                    yield Part(self._closing_content(), finish_reason=reason)

    def _text_part(self, delta: TextDelta, echoed: Sequence[TokenWithLogprobs]) -> Part:
        logprobs = None
        token_ids = None
        if self._prepared.options.num_logprobs >= 0:
            logprobs = self._logprobs([*echoed, *delta.logprobs])
        if self._body.return_token_ids:
            token_ids = delta.token_ids
        return Part(self._text_content(delta.text), logprobs, token_ids)

    def _echoed_tokens(self, index: int, event: PromptLogprobs) -> Sequence[TokenWithLogprobs]:
        """Return the tokens of the prompt that the text begins with, if logprobs are requested."""
        echoes = self._prepared.echoes
        count = self._prepared.options.num_logprobs
        if not echoes or count < 0:
            return ()
        prompt = self._prepared.prompt_of(index)
        ids = self._prepared.prompts[prompt]
        return echoed_tokens(ids, event.logprobs, echoes[prompt].offsets, count)

    # Overridden

    def _first_chunk(self, index: int, part: Part) -> bytes:
        """Return a chunk that a choice begins with, or none. `part` is the choice's next one."""
        return b""

    def _opening_content(self) -> Json:
        raise NotImplementedError

    def _text_content(self, text: str) -> Json:
        raise NotImplementedError

    def _closing_content(self) -> Json:
        raise NotImplementedError

    def _finish_reason(self, reason: FinishReason) -> str:
        return reason

    def _reasoning_content(self, text: str) -> Json:
        raise NotImplementedError  # only answers to chats have reasoning and calls

    def _call_content(self, delta: ToolCallDelta) -> Json:
        raise NotImplementedError

    def _delta(self, content: Json) -> Json:
        """Return the field or fields of a chunk's choice that hold `content`."""
        return content

    def _message(self, content: Json) -> Json:
        """Return the field or fields of a whole answer's choice that hold `content`."""
        return content

    def _logprobs(self, tokens: Sequence[TokenWithLogprobs]) -> Json:
        raise NotImplementedError

    def _whole_fields(self, answers: Sequence[ChoiceEvents]) -> Json:
        """Return more fields of a whole answer, besides its choices."""
        return {}


class CompletionWriter(OpenAIWriter):
    """Writes text_completion objects. Each choice has the fields about its prompt, as in vLLM."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> bytes:
        """Return one chunk per choice if there are fields about the prompts, otherwise nothing."""
        events = b""
        for index in range(self._prepared.num_choices):
            fields = self._prompt_fields(index)
            if fields:
                entry = self._delta_entry(index, Part(self._opening_content()))
                events += self._chunk([entry | fields])
        return events

    def _answer(self, answer: ChoiceEvents) -> Json:
        return super()._answer(answer) | self._prompt_fields(answer.index, answer.events)

    def _opening_content(self) -> Json:
        return {"text": ""}

    def _text_content(self, text: str) -> Json:
        return {"text": text}

    def _closing_content(self) -> Json:
        return {"text": ""}

    def _logprobs(self, tokens: Sequence[TokenWithLogprobs]) -> Json:
        return completion_logprobs(self._tokenizer, tokens, self._token_name)


def usage_fields(usage: Usage) -> Json:
    """Return `usage` as in OpenAI's API."""
    fields: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields
