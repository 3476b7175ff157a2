"""From options to SamplingParams: checks, and the defaults of the checkpoint."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from engine.protocol.generate import SamplingParams
from engine.protocol.sampling_parameters import DEFAULTS
from server.generation.limits import check_token_ids
from server.generation.options import GenerationOptions
from server.http.errors import invalid
from server.state import AppState

TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
BANNED = float("-inf")  # logit bias of a token that is never sampled
MAX_SHOWN = 5  # keys that an error message quotes
MAX_BANNED_TOKENS = 2048  # in the sequences of one request: each step compares them all


def check_option_tokens(state: AppState, options: GenerationOptions) -> None:
    """Raise a 400 ApiError if an option names a token that is not in the vocabulary."""
    check_token_ids(state, options.stop_token_ids, "stop_token_ids")
    check_token_ids(state, options.allowed_token_ids, "allowed_token_ids")
    check_token_ids(state, options.logprob_token_ids, "logprob_token_ids")
    _check_logit_bias(state, options.logit_bias)


def _check_logit_bias(state: AppState, keys: Iterable[str]) -> None:
    """Raise a 400 ApiError if a key is not a token id."""
    vocab_size = state.loaded().vocab_size
    # "07" would name token 7 a second time.
    bad = [key for key in keys if not TOKEN_ID.fullmatch(key) or int(key) >= vocab_size]
    if bad:
        shown = ", ".join([repr(key[:32]) for key in bad[:MAX_SHOWN]])
        more = ", …" if len(bad) > MAX_SHOWN else ""
        message = f"logit_bias: not token ids below {vocab_size}: {shown}{more}."
        raise invalid("logit_bias", message)


def sampling_params(state: AppState, options: GenerationOptions) -> SamplingParams:
    """Return the parameters of the first choice, with `max_tokens` still to be set.

    A parameter that the request does not set comes from generation_config.json, otherwise from
    OpenAI's documentation.
    """
    sampling = {**DEFAULTS, **state.tokenizer.defaults, **options.sampling}
    values: dict[str, Any] = {name: type(DEFAULTS[name])(sampling[name]) for name in DEFAULTS}
    values["top_k"] = max(values["top_k"], 0)
    if values["top_p"] == 0:  # an empty nucleus still holds the likeliest token
        values |= {"top_k": 1, "top_p": 1.0}
    return SamplingParams(
        max_tokens=1,
        **values,
        logit_bias=_logit_bias(state, options),
        allowed_token_ids=tuple(sorted(set(options.allowed_token_ids))),
        seed=_seed(state, options.seed),
        min_tokens=options.min_tokens,
        stop_token_ids=_end_tokens(state, options),
        logprobs=options.num_logprobs,
        prompt_logprobs=options.num_prompt_logprobs,
        grammar=None if options.grammar is None else state.write_grammar(options.grammar),
        banned_sequences=_banned_sequences(state, options.bad_words),
        logprob_token_ids=tuple(options.logprob_token_ids),
        final_logprobs=options.final_logprobs,
    )


def _seed(state: AppState, given: int | None) -> int:
    given = state.config.seed if given is None else given
    # -1 is random, as in vLLM and llama.cpp. Front ends send it to get another answer each time.
    if given is None or given == -1:
        return secrets.randbits(63)
    return given


def _logit_bias(state: AppState, options: GenerationOptions) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token, with the tokens that the checkpoint bans."""
    vocab_size = state.loaded().vocab_size
    bias = {int(token): float(value) for token, value in options.logit_bias.items()}
    for token in state.tokenizer.suppressed_ids:
        if token < vocab_size:
            bias[token] = BANNED
    return tuple(bias.items())


def _banned_sequences(state: AppState, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of `words`, each with and without a space before it.

    Raises a 400 ApiError if a word has no tokens, or all words together have too many.
    """
    vocab_size = state.loaded().vocab_size
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, " " + bare):
            ids = state.tokenizer.encode(text, add_special_tokens=False)
            if not ids:
                raise invalid("bad_words", f"The word {word[:32]!r} has no tokens.")
            if max(ids) < vocab_size:  # the model generates no other
                found[tuple(ids)] = None
    if sum(map(len, found)) > MAX_BANNED_TOKENS:
        message = f"The words have more than {MAX_BANNED_TOKENS} tokens."
        raise invalid("bad_words", message)
    return tuple(found)


def _end_tokens(state: AppState, options: GenerationOptions) -> tuple[int, ...]:
    ends = set(options.stop_token_ids)
    # A grammar's end is the end of the answer.
    if not options.ignore_eos or (options.grammar and options.grammar.holds_end):
        ends.update(state.tokenizer.eos_token_ids)
    return tuple(sorted(ends))


def check_first_tokens(state: AppState, params: SamplingParams) -> None:
    """Raise a 400 ApiError if the first `min_tokens` tokens cannot be generated."""
    if not params.min_tokens:
        return
    # Vocabularies of bytes are so small that a request can exclude all of their tokens.
    excluded = {token for token, bias in params.logit_bias if bias == BANNED}
    excluded.update(params.stop_token_ids)
    if params.allowed_token_ids and excluded.issuperset(params.allowed_token_ids):
        message = "allowed_token_ids has only tokens that end the answer, which min_tokens forbids."
        raise invalid("allowed_token_ids", message)
    vocab_size = state.loaded().vocab_size
    if sum(token < vocab_size for token in excluded) >= vocab_size:
        message = "stop_token_ids hold every token there is, so that none is left to begin with."
        raise invalid("stop_token_ids", message)
