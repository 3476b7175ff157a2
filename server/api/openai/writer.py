"""A plan to its answer: one JSON object, or the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from engine.protocol import TokenLogprobs
from server.api.openai.dialect import Dialect, by_token_id, echoed_tokens
from server.generation.off_loop import off_loop
from server.generation.prepare import PreparedRequest
from server.generation.submission import Choice, Delta, Generation
from server.http.body import ignored_header
from server.http.disconnect import cancel_on_disconnect
from server.state import AppState

CHARS_PER_LOGPROB = 8  # of a text that takes as long
# Clients that read an event by text lines would end it here; JSON may have them escaped.
LINE_SEPARATORS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]


class Answer:
    """One answer as the client gets it; owns its Generation."""

    def __init__(self, state: AppState, plan: PreparedRequest, dialect: Dialect) -> None:
        self.state, self._dialect, self._tokenizer = state, dialect, state.tokenizer
        self.generation, self._plan = Generation(state, plan), plan
        self._id = dialect.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._plan.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def headers(self) -> dict[str, str]:
        return ignored_header(self._plan.ignored)

    def _prompt_fields(
        self, choice: Choice, scores: Sequence[TokenLogprobs] | None = None
    ) -> dict[str, Any]:
        """What was asked for of the choice's prompt."""
        body, ids = self._plan.body, self._plan.prompts[choice.prompt]
        fields: dict[str, Any] = {"prompt_token_ids": ids} if body.return_token_ids else {}
        if scores is not None and (count := body.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = by_token_id(self._tokenizer, ids, scores, count)
        return fields

    def _entry(
        self,
        choice: Choice,
        payload: dict[str, Any],
        delta: Delta | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        """One of `choices`, whole or streamed; `delta` where it holds tokens."""
        body = self._plan.body
        entry = {"index": choice.index, **payload, "logprobs": None, "finish_reason": finish}
        if delta is not None and body.num_logprobs >= 0:
            scored, prompt = delta.scored, choice.prompt
            if delta.prompt is not None and self._plan.echoes:
                ids, offsets = self._plan.prompts[prompt], self._plan.echoes[prompt].offsets
                echo = echoed_tokens(ids, delta.prompt, offsets, body.num_logprobs)
                scored = [*echo, *scored]
            entry["logprobs"] = self._dialect.logprobs(self._tokenizer, scored)
        if delta is not None and body.return_token_ids:
            entry["token_ids"] = delta.token_ids
        return entry

    async def whole(self, request: Request) -> Response:
        """Waits for everything; aborts where the client leaves first."""
        deltas = await cancel_on_disconnect(request.receive, self.generation.collect())
        body = await self._written(deltas, lambda: self._body(deltas))
        return Response(body, media_type="application/json", headers=self.headers())

    async def _written(self, deltas: Sequence[Delta], write: Callable[[], bytes]) -> bytes:
        """What `write` makes of them: beside the loop where they hold many log-probabilities."""
        body, tokens = self._plan.body, sum(len(d.scored) + len(d.prompt or ()) for d in deltas)
        entries = 2 + max(body.num_logprobs, body.num_prompt_logprobs)
        return await off_loop(CHARS_PER_LOGPROB * entries * tokens, write)

    def _body(self, deltas: Sequence[Delta]) -> bytes:
        choices, entries = self.generation.choices, []
        for choice, delta in zip(choices, deltas, strict=True):
            message = self._dialect.message(delta.text)
            entry = self._entry(choice, message, delta, choice.finish)
            if self._dialect.prompt_on_choice:
                entry |= self._prompt_fields(choice, delta.prompt)
            entries.append(entry)
        body = self._head(self._dialect.whole)
        body |= {"choices": entries, "usage": self.generation.usage()}
        if not self._dialect.prompt_on_choice:
            body |= self._prompt_fields(choices[0], deltas[0].prompt)
        return orjson.dumps(body)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One chunk of the stream."""
        usage = {"usage": None} if self._plan.body.include_usage else {}
        chunk = {**self._head(self._dialect.chunk), "choices": choices, **usage, **more}
        data = orjson.dumps(chunk)
        for separator, escape in LINE_SEPARATORS:
            data = data.replace(separator, escape)
        return b"data: " + data + b"\n\n"

    def opening(self) -> bytes:
        """The chunks before any text; of completions only where these say anything."""
        dialect, events = self._dialect, b""
        for choice in self.generation.choices:
            fields, entry = self._prompt_fields(choice), self._entry(choice, dialect.opening)
            if not dialect.prompt_on_choice:
                events += self._event([entry], **({} if events else fields))
            elif fields:
                events += self._event([entry | fields])
        return events

    async def growth(self, choices: Sequence[Choice]) -> bytes:
        """What has come for these choices, and the closing chunks of those that have finished."""
        deltas = [choice.take() for choice in choices]
        return await self._written(deltas, lambda: b"".join(map(self._grown, choices, deltas)))

    def _grown(self, choice: Choice, delta: Delta) -> bytes:
        events = b""
        scores = delta.scored or delta.prompt is not None
        if delta.text or scores or self._plan.body.return_token_ids:
            events = self._event([self._entry(choice, self._dialect.part(delta.text), delta)])
        if choice.finish is not None:
            closing = self._entry(choice, self._dialect.closing, finish=choice.finish)
            events += self._event([closing])
        return events

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._plan.body.include_usage:
            return done
        return self._event([], usage=self.generation.usage()) + done
