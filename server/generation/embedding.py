"""Texts to vectors: tokenised, checked, submitted, and ended exactly once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from starlette.requests import Request

from engine.protocol import EmbedOutput, EmbedRequest
from server.api.openai.schemas.embedding import EncoderBody
from server.generation.off_loop import off_loop
from server.generation.prepare import check_token_ids, too_long
from server.generation.submission import abort_reason
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import ApiError, invalid, numerical_error
from server.state import AppState

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]  # [texts, dimensions]


async def token_lists(
    state: AppState, body: EncoderBody, texts: Sequence[str | list[int]], param: str
) -> list[list[int]]:
    """The ids of each text, special tokens included; ids are taken as they are. Raises ApiError
    where one is too long and truncation was not asked for. `param` names the texts' field."""
    most = _truncation(state, body)
    lowercase, tokenizer = state.pooling.lowercase, state.tokenizer
    names = [param if len(texts) == 1 else f"{param}.{index}" for index in range(len(texts))]

    def ids(text: str | list[int], name: str) -> list[int]:
        if not isinstance(text, str):
            return text[:most]
        text = text.lower() if lowercase else text
        if most is not None:
            return tokenizer.encode_start(text, most)
        if count := tokenizer.far_over(text, state.max_length()):
            raise _too_long(state, count, name)
        return tokenizer.encode(text)

    lists = await off_loop(sum(map(len, texts)), lambda: list(map(ids, texts, names)))
    for tokens, name in zip(lists, names, strict=True):
        check_token_ids(state, tokens, name)
        if len(tokens) > state.max_length():
            raise _too_long(state, str(len(tokens)), name)
    return lists


def _truncation(state: AppState, body: EncoderBody) -> int | None:
    asked, longest = body.truncate_prompt_tokens, state.max_length()
    if asked is None:
        return None
    if asked == -1:
        return longest
    if not (added := state.tokenizer.added_tokens) < asked <= longest:
        message = f"must be -1, or above {added} and at most {longest} here, not {asked}"
        raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens {message}.")
    return asked


def _too_long(state: AppState, count: str, param: str) -> ApiError:
    advice = "shorten it, or have its end cut off with truncate_prompt_tokens"
    return too_long(state.max_length(), f"this text has {count}: {advice}", param)


async def embed(
    request: Request, state: AppState, body: EncoderBody, lists: list[list[int]]
) -> Vectors:
    """One vector for each list of tokens, as pooled; aborts where the client leaves first."""
    embedding = Embedding(state, lists, request.state.arrival, body.priority or 0)
    try:
        return await cancel_on_disconnect(request.receive, embedding.collect())
    except BaseException as error:
        embedding.close(error)
        raise


def normalised(vectors: Vectors) -> Vectors:
    """Each at length 1, but a zero, as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return units


class Embedding:
    """The texts of one HTTP request; raises as EngineClient.embed where there is no room."""

    def __init__(
        self, state: AppState, lists: list[list[int]], arrival: float, priority: int
    ) -> None:
        self._metrics, self._client = state.metrics, state.client
        self._arrival, self._submitted = arrival, time.monotonic()
        pooling, next_id = state.pooling.mode, self._client.next_id
        requests = [EmbedRequest(next_id(), ids, pooling, arrival, priority) for ids in lists]
        self._texts = {request.id: request for request in requests}
        self._stream = self._client.embed(requests)

    async def collect(self) -> Vectors:
        """All vectors in the order of the texts. Raises EngineError and ApiError."""
        vectors: dict[int, bytes] = {}
        async for batch in self._stream:
            for at, output in batch:
                if output.finish == "error":
                    raise numerical_error()
                vectors[output.id] = output.vector
                self._observe(at, output)
        rows = [np.frombuffer(vectors[i], dtype="<f4") for i in self._texts]
        return np.stack(rows).astype(np.float32, copy=False)

    def _observe(self, at: float, output: EmbedOutput) -> None:
        tokens, admission = self._texts[output.id].tokens, self._stream.admissions.get(output.id)
        self._metrics.begin(len(tokens), self._submitted, admission, at)
        self._metrics.embedded(self._arrival)

    def close(self, error: BaseException) -> None:
        """Aborts what is unfinished, because of `error`."""
        self._metrics.abort(abort_reason(error, draining=self._client.state == "draining"))
        self._stream.close()
