"""Errors of llama.cpp's own routes that its clients act on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import orjson

from server.generation.limits import ContextExceeded
from server.http.errors import ApiError
from server.state import AppState

KIND = "exceed_context_size_error"


class ContextSizeError(ApiError):
    """A prompt that is longer than the context, with both lengths, as in llama.cpp."""

    tokens: int
    longest: int

    def body(self, request_id: str, path: str = "") -> bytes:
        fields = orjson.loads(super().body(request_id, path))
        lengths = {"n_prompt_tokens": self.tokens, "n_ctx": self.longest}
        return orjson.dumps({"error": fields["error"] | {"type": KIND} | lengths})


@contextlib.contextmanager
def own_errors(state: AppState) -> Iterator[None]:
    """Raise errors about the context in llama.cpp's form.

    A text so long that only its start was tokenised keeps the common form: its length is unknown.
    """
    try:
        yield
    except ContextExceeded as error:
        if error.tokens is None:
            raise
        longest = state.max_length()
        message = (
            f"The prompt of {error.tokens} tokens exceeds the available context size of "
            f"{longest} tokens."
        )
        if error.tokens <= longest:  # the answer does not fit
            message = error.message
        own = ContextSizeError(400, error.code, message, param=error.param)
        own.tokens, own.longest = error.tokens, longest
        raise own from None
