"""How the two APIs write the same generation: chat.completion and text_completion objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from server.generation import ScoredToken
from server.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot hold


@dataclass(frozen=True)
class Dialect:
    id_prefix: str
    whole: str  # `object` of a complete answer
    chunk: str  # `object` of a streamed part
    message: Callable[[str], dict[str, Any]]  # a choice's text in a complete answer
    part: Callable[[str], dict[str, Any]]  # and in a chunk
    opening: dict[str, Any]  # a choice's first chunk, before any text; empty for none
    closing: dict[str, Any]  # a choice's last chunk, beside finish_reason
    logprobs: Callable[[Tokenizer, Sequence[ScoredToken]], dict[str, Any]]
    prompt_ids_on_choice: bool  # where vLLM puts prompt_token_ids


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = [
        entry(item.token, item.logprobs.logprob)
        | {"top_logprobs": [entry(*pair) for pair in item.logprobs.top]}
        for item in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> dict[str, Any]:
    text = tokenizer.token_text

    def top(item: ScoredToken) -> dict[str, float]:
        """The likeliest tokens, and the sampled one in any case; of tokens with one text, which
        are one key, the likelier wins."""
        found: dict[str, float] = {}
        for token, logprob in (*item.logprobs.top, (item.token, item.logprobs.logprob)):
            found.setdefault(text(token), finite(logprob))
        return found

    return {
        "tokens": [text(item.token) for item in scored],
        "token_logprobs": [finite(item.logprobs.logprob) for item in scored],
        "top_logprobs": [top(item) for item in scored],
        "text_offset": [item.offset for item in scored],
    }


CHAT = Dialect(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    message=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
    logprobs=chat_logprobs,
    prompt_ids_on_choice=False,
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    message=lambda text: {"text": text},
    part=lambda text: {"text": text},
    opening={},
    closing={"text": ""},
    logprobs=completion_logprobs,
    prompt_ids_on_choice=True,
)
