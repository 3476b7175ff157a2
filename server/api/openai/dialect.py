"""How the two APIs write the same generation: chat.completion and text_completion objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol import TokenLogprobs
from server.generation.submission import TokenWithLogprobs
from server.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot hold


@dataclass(frozen=True)
class Dialect:
    id_prefix: str
    whole: str  # `object` of a complete answer
    chunk: str  # `object` of a streamed part
    message: Callable[[str], dict[str, Any]]  # a choice's text in a complete answer
    part: Callable[[str], dict[str, Any]]  # and in a chunk
    opening: dict[str, Any]  # a choice's first chunk, before any text; completions seldom have one
    closing: dict[str, Any]  # a choice's last chunk, beside finish_reason
    logprobs: Callable[[Tokenizer, Sequence[TokenWithLogprobs]], dict[str, Any]]
    prompt_on_choice: bool  # where vLLM puts prompt_token_ids and prompt_logprobs


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[TokenWithLogprobs]) -> dict[str, Any]:
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
        if item.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, scored: Sequence[TokenWithLogprobs]
) -> dict[str, Any]:
    text = tokenizer.token_text

    def top(token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the sampled one in any case; of tokens with one text, which
        are one key, the likelier wins."""
        found: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token, logprobs.logprob)):
            found.setdefault(text(other), finite(logprob))
        return found

    return {
        "tokens": [text(item.token) for item in scored],
        "token_logprobs": [item.logprobs and finite(item.logprobs.logprob) for item in scored],
        "top_logprobs": [item.logprobs and top(item.token, item.logprobs) for item in scored],
        "text_offset": [item.offset for item in scored],
    }


def echoed_tokens(
    ids: Sequence[int], scores: Sequence[TokenLogprobs], offsets: Sequence[int], count: int
) -> list[TokenWithLogprobs]:
    """The prompt `ids` as tokens of the text, each with the `count` likeliest in its place."""
    cut = [TokenLogprobs(score.logprob, score.top[:count]) for score in scores]
    return [TokenWithLogprobs(*each) for each in zip(ids, (None, *cut), offsets, strict=True)]


def by_token_id(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenLogprobs], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """As vLLM writes them: by token id, the prompt's own and the `count` likeliest. A rank that is
    not among these is null."""

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def entries(token: int, score: TokenLogprobs) -> dict[str, dict[str, Any]]:
        found = {str(token): entry(token, score.logprob, None)}
        for rank, (other, logprob) in enumerate(score.top[:count], 1):
            found[str(other)] = entry(other, logprob, rank)
        return found

    return [None, *(entries(*pair) for pair in zip(ids[1:], scores, strict=True))]


CHAT = Dialect(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    message=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
    logprobs=chat_logprobs,
    prompt_on_choice=False,
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    message=lambda text: {"text": text},
    part=lambda text: {"text": text},
    opening={"text": ""},
    closing={"text": ""},
    logprobs=completion_logprobs,
    prompt_on_choice=True,
)
