"""Logprobs in the formats of OpenAI's two APIs, and prompt logprobs in vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.protocol.generate import TokenLogprobs
from server.generation.events import TokenWithLogprobs
from server.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot represent


def finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)


Naming = Callable[[int], str]


def id_name(token: int) -> str:
    """Return a token's name in vLLM, with return_tokens_as_token_ids."""
    return f"token_id:{token}"


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[TokenWithLogprobs],
    name: Naming | None = None,
    *,
    lists_sampled: bool = False,
) -> dict[str, Any]:
    """Return `logprobs` of a chat completion's choice. By default a token's name is its text.

    With `lists_sampled` the sampled token is always among the alternatives.
    """
    name = name or tokenizer.token_text

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for item in tokens:
        if item.logprobs is None:
            continue
        own = entry(item.token, item.logprobs.logprob)
        top = dict(item.logprobs.top)
        if lists_sampled:
            top.setdefault(item.token, item.logprobs.logprob)
        own["top_logprobs"] = [entry(token, logprob) for token, logprob in top.items()]
        content.append(own)
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenWithLogprobs], name: Naming | None = None
) -> dict[str, Any]:
    """Return `logprobs` of a text completion's choice, with names as in `chat_logprobs`."""
    name = name or tokenizer.token_text
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for item in tokens:
        if item.logprobs is None:
            token_logprobs.append(None)
            top_logprobs.append(None)
        else:
            token_logprobs.append(finite(item.logprobs.logprob))
            top_logprobs.append(_by_name(name, item.token, item.logprobs))
    return {
        "tokens": [name(item.token) for item in tokens],
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": [item.offset for item in tokens],
    }


def _by_name(name: Naming, sampled: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Return the logprobs of the sampled token, which comes first, and of the likeliest, by name.

    Of tokens with equal text, which share one key, the likelier one is kept.
    """
    found: dict[str, float] = {}
    for token, logprob in ((sampled, logprobs.logprob), *logprobs.top):
        text = name(token)
        found[text] = max(found.get(text, MIN_LOGPROB), finite(logprob))
    return found


def echoed_tokens(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int], count: int
) -> list[TokenWithLogprobs]:
    """Return the tokens of an echoed prompt, each with its `count` likeliest alternatives."""
    limited = [TokenLogprobs(each.logprob, each.top[:count]) for each in logprobs]
    return [
        TokenWithLogprobs(token, own, offset)
        for token, own, offset in zip(ids, (None, *limited), offsets, strict=True)
    ]


def prompt_logprobs_by_id(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return `prompt_logprobs` as vLLM formats them: by token id, None for the first token.

    They hold each prompt token and its `count` likeliest alternatives.
    """

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    found: list[dict[str, dict[str, Any]] | None] = [None]
    for token, own in zip(ids[1:], logprobs, strict=True):
        entries = {str(token): entry(token, own.logprob, own.rank)}
        for rank, (other, logprob) in enumerate(own.top[:count], 1):
            entries[str(other)] = entry(other, logprob, rank)
        found.append(entries)
    return found
