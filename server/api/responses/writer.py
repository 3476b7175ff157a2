"""ResponsesWriter: response objects, whole or as a stream of typed and numbered events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from server.api.openai.logprobs import chat_logprobs
from server.api.openai.schemas.sampling_fields import given_parameters
from server.api.responses.offered import Called
from server.api.responses.open_call import Json
from server.api.responses.output import NO_NAMES, Output
from server.api.responses.schemas import ResponsesBody
from server.generation.events import ChoiceEvents, TokenWithLogprobs, Usage
from server.generation.prepare import PreparedRequest
from server.generation.sse import sse_event
from server.generation.writer import PING
from server.http.errors import ApiError
from server.text import exact_json
from server.text.tokenizer import Tokenizer

FAILED_CODES = {429: "rate_limit_exceeded", 500: "server_error", 503: "server_error"}


class ResponsesWriter:
    """Writes one response. The interface is `server.generation.writer.Writer`.

    `keep` is called with the JSON of the finished response, before the client gets it. It is None
    if the response is not to be stored. `called` says what the calls of tools are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prepared: PreparedRequest,
        body: ResponsesBody,
        response_id: str,
        keep: Callable[[bytes], None] | None,
        called: Mapping[str, Called] = NO_NAMES,
    ) -> None:
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._echo = body.echo()
        self._sampling = _sampling(prepared, body)
        self._id = response_id
        self._keep = keep
        self._created = int(time.time())
        self._output = Output(response_id, self._logprobs, called)
        self._num_events = 0
        self._repeated = b""  # the event that a ping repeats

    def opening(self) -> bytes:
        begun = self._response("in_progress", self._usage_before())
        created = self._event({"type": "response.created", "response": begun})
        in_progress = self._event({"type": "response.in_progress", "response": begun})
        self._repeated = in_progress
        return created + in_progress

    def ping(self) -> bytes:
        """Return a comment, with the last event again while there is no answer yet.

        Some clients, such as Codex, count only events as signs of life. A long prompt has none.
        """
        return PING[:-1] + self._repeated if self._repeated else PING

    def chunks(self, update: ChoiceEvents) -> bytes:
        chunks = b"".join([self._event(event) for event in self._output.add(update)])
        if chunks:
            self._repeated = b""
        return chunks

    def closing(self, usage: Usage) -> bytes:
        response = self._finished(usage)
        self._store(response)
        return self._event({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: ApiError) -> bytes:
        """Return the event of the error and, last of all, the failed response."""
        described = orjson.loads(error.body(self._prepared.request_id))["error"]
        fields = {name: described[name] for name in ("code", "message", "param")}
        response = self._response("failed", self._usage_before())
        response["error"] = {
            "code": FAILED_CODES.get(error.status, "invalid_prompt"),
            "message": described["message"],
        }
        event = self._event({"type": "error", **fields})
        return event + self._event({"type": "response.failed", "response": response})

    def whole(self, answers: Sequence[ChoiceEvents], usage: Usage) -> bytes:
        for answer in answers:
            for _ in self._output.add(answer):
                pass  # the events that a stream would have
        response = self._finished(usage)
        self._store(response)
        return exact_json.dumps(response)

    def _event(self, event: Json) -> bytes:
        number = self._num_events
        self._num_events += 1
        return sse_event(exact_json.dumps({**event, "sequence_number": number}), event["type"])

    def _store(self, response: Json) -> None:
        if self._keep is not None:
            self._keep(exact_json.dumps(response))

    def _finished(self, usage: Usage) -> Json:
        status = "incomplete" if self._output.finish == "length" else "completed"
        return self._response(status, usage)

    def _response(self, status: str, usage: Usage) -> Json:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": self._prepared.model,
            "output": self._output.items(),
            "usage": usage_fields(usage),
            **self._sampling,
            **self._echo,
            "store": self._keep is not None,
            "background": False,
            "conversation": None,
            "moderation": None,
            "prompt": None,
            "prompt_cache_retention": None,
            "service_tier": "default",
            "truncation": "disabled",
        }

    def _usage_before(self) -> Usage:
        """Return the usage that is known before the engine reports: the tokens of the prompt."""
        tokens = sum(map(len, self._prepared.prompts))
        return Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=0)

    def _logprobs(self, tokens: Sequence[TokenWithLogprobs]) -> list[Json]:
        content: list[Json] = chat_logprobs(self._tokenizer, tokens)["content"]
        return content


def _sampling(prepared: PreparedRequest, body: ResponsesBody) -> dict[str, Any]:
    """Return the values in use: the request's, otherwise the checkpoint's defaults."""
    params = prepared.params[0]
    return {
        "temperature": params.temperature,
        "top_p": given_parameters(body).get("top_p", params.top_p),
    }


def usage_fields(usage: Usage) -> Json:
    """Return `usage` as in the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        # The prefix cache is written in any case, and nothing is charged for it.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
