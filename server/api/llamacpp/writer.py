"""Writer of llama.cpp's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import Any

import orjson

from engine.protocol.sampling_parameters import PARAMETERS
from server.api.llamacpp.progress import progress_of
from server.api.llamacpp.samplers import RENAMED, SERVED
from server.api.llamacpp.schemas import CompletionBody
from server.api.openai.logprobs import finite
from server.api.openai.timings import timing_fields
from server.generation.events import ChoiceEvents, Finish, TextDelta, TokenWithLogprobs, Usage
from server.generation.prepare import PreparedRequest
from server.generation.sse import sse_event
from server.generation.writer import PING
from server.http.errors import ApiError
from server.text.tokenizer import Tokenizer

Json = dict[str, Any]
NO_SLOT = -1
# Parameters that requests cannot set to another value, and one without effect: llama.cpp's default.
FIXED = {
    name: accepted[0]
    for name, accepted in CompletionBody.UNSUPPORTED.items()
    if isinstance(accepted[0], int)
} | {"adaptive_decay": 0.9}


class CompletionWriter:
    """Writes the answers of /completion. The interface is `server.generation.writer.Writer`."""

    def __init__(
        self, tokenizer: Tokenizer, prepared: PreparedRequest, body: CompletionBody
    ) -> None:
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._body = body
        self._texts = [""] * prepared.num_choices  # sent so far, by choice
        self._counts = [0] * prepared.num_choices

    def opening(self) -> bytes:
        return b""

    def chunks(self, update: ChoiceEvents) -> bytes:
        """Return a part for the text, and the end of the choice."""
        events = self._progress(update)
        if events:
            return events
        text, tokens, logprobs = _joined(update)
        self._texts[update.index] += text
        self._counts[update.index] += len(tokens)
        if tokens:
            for item in logprobs[:-1]:  # a part has the logprobs of one token
                events += self._part(update, "", [item.token], [item])
                tokens = tokens[1:]
            events += self._part(update, text, tokens, logprobs[-1:])
            text = ""
        finish = _finish_of(update)
        if finish is not None:
            end = self._head(update.index, text, ()) | self._end(update, finish)
            events += sse_event(orjson.dumps(self._selected(end)))
        return events

    def _progress(self, update: ChoiceEvents) -> bytes:
        """Return the parts that tell how much of a prompt is computed."""
        events = b""
        for progress in progress_of(update, with_timings=bool(self._body.timings_per_token)):
            part = self._head(update.index, "", ()) | {"stop": False} | progress
            events += sse_event(orjson.dumps(part))
        return events

    def _part(
        self,
        update: ChoiceEvents,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[TokenWithLogprobs],
    ) -> bytes:
        """Return the event of a part that is not the end."""
        part = self._head(update.index, text, tokens) | {"stop": False}
        part |= self._probabilities(logprobs)
        if self._body.timings_per_token and update.timings is not None:
            part["timings"] = timing_fields(update.timings)
        return sse_event(orjson.dumps(part))

    def ping(self) -> bytes:
        return PING

    def closing(self, usage: Usage) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return sse_event(error.body(self._prepared.request_id))

    def whole(self, answers: Sequence[ChoiceEvents], usage: Usage) -> bytes:
        found = [self._selected(self._answer(answer)) for answer in answers]
        return orjson.dumps(found[0] if len(found) == 1 else found)

    def _answer(self, answer: ChoiceEvents) -> Json:
        text, tokens, logprobs = _joined(answer)
        self._texts[answer.index] = text
        self._counts[answer.index] = len(tokens)
        finish = _finish_of(answer)
        assert finish is not None
        shown = tokens if self._body.return_tokens else ()
        body = self._head(answer.index, text, shown) | self._end(answer, finish)
        return body | self._probabilities(logprobs)

    def _head(self, index: int, text: str, tokens: Sequence[int]) -> Json:
        """Return the fields that every part of a choice has."""
        return {
            "index": index,
            "content": text,
            "tokens": list(tokens),
            "id_slot": NO_SLOT,
            "model": self._prepared.model,
            "tokens_predicted": self._counts[index],
            "tokens_evaluated": len(self._prompt(index)),
        }

    def _end(self, update: ChoiceEvents, finish: Finish) -> Json:
        """Return the fields of the end of a choice."""
        index = update.index
        fields: Json = {
            "stop": True,
            "stop_type": _stop_type(finish),
            "stopping_word": finish.stop or "",
            "has_new_line": "\n" in self._texts[index],
            "truncated": finish.reason == "length" and self._ends_with_context(index),
            "prompt": self._tokenizer.decode(self._prompt(index), skip_special_tokens=False),
            "tokens_cached": len(self._prompt(index)) + self._counts[index],
            "generation_settings": generation_settings(self._prepared, self._body, index),
        }
        if update.timings is not None:
            fields["timings"] = timing_fields(update.timings)
        return fields

    def _prompt(self, index: int) -> Sequence[int]:
        return self._prepared.prompts[self._prepared.prompt_of(index)]

    def _ends_with_context(self, index: int) -> bool:
        wanted = self._prepared.options.max_tokens
        limit = self._prepared.params[self._prepared.prompt_of(index)].max_tokens
        return wanted is None or limit < wanted

    def _selected(self, body: Json) -> Json:
        """Return the fields that `response_fields` names, by these names; all by default."""
        if not self._body.response_fields:
            return body
        found = {}
        for path in self._body.response_fields:
            value: Any = body
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found

    def _probabilities(self, tokens: Sequence[TokenWithLogprobs]) -> Json:
        """Return `completion_probabilities`, if the request has `n_probs`."""
        if self._prepared.options.num_logprobs < 0:
            return {}
        is_final = self._prepared.options.final_logprobs
        name = "top_probs" if is_final else "top_logprobs"
        entries = []
        for item in tokens:
            if item.logprobs is not None:
                entry = self._probability(item.token, item.logprobs.logprob)
                top = item.logprobs.top
                if is_final:  # without tokens that are never drawn
                    top = tuple([other for other in top if other[1] > -inf])
                entry[name] = [self._probability(*other) for other in top]
                entries.append(entry)
        return {"completion_probabilities": entries}

    def _probability(self, token: int, logprob: float) -> Json:
        entry: Json = {
            "id": token,
            "token": self._tokenizer.token_text(token),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
        if self._prepared.options.final_logprobs:
            entry["prob"] = exp(logprob)
        else:
            entry["logprob"] = finite(logprob)
        return entry


def _joined(update: ChoiceEvents) -> tuple[str, list[int], list[TokenWithLogprobs]]:
    """Return the text, the tokens and the logprobs of an update."""
    deltas = [event for event in update.events if isinstance(event, TextDelta)]
    text = "".join([delta.text for delta in deltas])
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [item for delta in deltas for item in delta.logprobs]
    return text, tokens, logprobs


def _finish_of(update: ChoiceEvents) -> Finish | None:
    for event in update.events:
        if isinstance(event, Finish):
            return event
    return None


def _stop_type(finish: Finish) -> str:
    if finish.stop is not None:
        return "word"
    return "limit" if finish.reason == "length" else "eos"


def generation_settings(prepared: PreparedRequest, body: CompletionBody, index: int) -> Json:
    """Return the parameters that a choice was generated with, under llama.cpp's names."""
    params = prepared.params[prepared.prompt_of(index)]
    limit = prepared.options.max_tokens
    # llama.cpp lists the end tokens that ignore_eos forbids as biases of minus infinity, or null.
    biases = [
        {"token": token, "bias": None if bias == float("-inf") else bias}
        for token, bias in params.logit_bias
    ]
    return {
        **FIXED,
        "seed": params.seed,
        **{RENAMED.get(name, name): getattr(params, name) for name in PARAMETERS},
        "repeat_last_n": -1,
        "stop": list(prepared.options.stop),
        "n_predict": -1 if limit is None else limit,
        "max_tokens": params.max_tokens,
        "ignore_eos": prepared.options.ignore_eos,
        "logit_bias": biases,
        "n_probs": max(prepared.options.num_logprobs, 0),
        "t_max_predict_ms": -1 if body.t_max_predict_ms is None else body.t_max_predict_ms,
        "samplers": SERVED if body.samplers is None else body.samplers,
        "grammar": body.grammar or "",
        "stream": prepared.options.stream,
        "timings_per_token": prepared.options.timings_per_token,
        "post_sampling_probs": prepared.options.final_logprobs,
    }
