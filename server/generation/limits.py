"""The limits of one request: token ids, lengths, and the number of logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from server.generation.options import GenerationOptions
from server.http.errors import ApiError, invalid
from server.state import AppState

LAST_PRIORITY = 2**31 - 1  # behind all other requests
MAX_CHOICES = 2048  # of one request
MAX_PROMPT_LOGPROBS = 2**18  # logprobs of prompts in one response, about 1 KB each
MAX_ANSWER_LOGPROBS = 2**22  # logprobs of several choices in one response: up to 1 GB


class ContextExceeded(ApiError):
    """A text is too long for the context; `tokens` is its length, if that is known."""

    tokens: int | None = None


def context_exceeded(
    longest: int, requested: str, param: str, tokens: int | None = None
) -> ContextExceeded:
    """Return the error for a text of more than `longest` tokens; `requested` names its length."""
    # LiteLLM looks for these words before it tries a model with a longer context.
    message = f"This model's maximum context length is {longest} tokens, but {requested}."
    error = ContextExceeded(400, "context_length_exceeded", message, param=param)
    error.tokens = tokens
    return error


def prompt_alone(count: int | str, num_image_tokens: int) -> str:
    """Describe a prompt that does not fit. Some of its tokens may stand for images."""
    images = f", {num_image_tokens} of them for images" if num_image_tokens else ""
    return f"the prompt alone has {count}{images}"


def check_priority(request: Request, priority: int) -> None:
    """Raise a 403 ApiError if the request's key must not set a priority.

    The lines of a batch have the last one, which takes nothing from others.
    """
    if priority not in (0, LAST_PRIORITY) and not request.state.may_prioritize:
        message = (
            f"This API key must not set priority, which is {priority} here. The key file allows it "
            "with `priority=true` behind a key."
        )
        raise ApiError(403, "permission_denied", message, param="priority")


def check_token_ids(state: AppState, ids: Sequence[int], param: str, *, advice: str = "") -> None:
    """Raise a 400 ApiError if a token id is not in the vocabulary. `advice` ends its message."""
    vocab_size = state.loaded().vocab_size
    largest = max(ids, default=0)
    if largest >= vocab_size:
        message = f"Token id {largest} is out of vocabulary: it has {vocab_size} tokens."
        raise invalid(param, f"{message} {advice}".rstrip())


def check_no_images(state: AppState, ids: Sequence[int], param: str) -> None:
    """Raise a 400 ApiError if a prompt without images has the token in whose place they are."""
    if state.image_token is not None and state.image_token in ids:
        name = state.tokenizer.vocabulary_entry(state.image_token)
        message = f"The prompt has the token {name}, which stands for an image; "
        raise invalid(param, message + "send the image in a chat instead.")


def token_limit(
    state: AppState,
    options: GenerationOptions,
    prompt: Sequence[int],
    param: str,
    num_image_tokens: int = 0,
) -> int:
    """Return how many tokens may be generated for `prompt`.

    This is `max_tokens`, or less if the context ends before: clients ask for tens of thousands by
    rote. With --strict-max-tokens that is a 400 ApiError, as is a prompt that is empty or fills the
    context. The answer of an encoder–decoder does not share its context with the prompt. It begins
    with one start token. The message names the `num_image_tokens` of the prompt.
    """
    if not prompt:
        raise invalid(param, "The prompt has no tokens.")
    longest = state.max_length()
    used = len(prompt)
    if state.start_token is not None:
        used = 1
    least = (options.max_tokens or 1) if state.config.strict_max_tokens else 1
    if max(len(prompt), used + least) > longest:
        requested = _requested(state, options, len(prompt), used, num_image_tokens)
        raise context_exceeded(longest, requested, param, len(prompt))
    most = most_tokens(state, options)
    return longest - used if most is None else min(most, longest - used)


def most_tokens(state: AppState, options: GenerationOptions) -> int | None:
    """Return how many tokens of an answer a request allows; None: as many as the context has."""
    if options.max_tokens is None and state.start_token is None:
        return options.default_max_tokens
    return options.max_tokens


def check_min_tokens(
    state: AppState, options: GenerationOptions, token_limits: Sequence[int]
) -> None:
    """Raise a 400 ApiError if `min_tokens` is more than the request allows.

    More than the context has room for is lowered, as `max_tokens` is; --strict-max-tokens refuses
    that, too.
    """
    most = most_tokens(state, options)
    if most is not None and options.min_tokens > most:
        message = f"min_tokens must be at most max_tokens, which is {most} here."
        raise invalid("min_tokens", message)
    if state.config.strict_max_tokens and options.min_tokens > min(token_limits):
        raise invalid("min_tokens", f"min_tokens must be at most {min(token_limits)} here.")


def check_choices(options: GenerationOptions, num_prompts: int, param: str) -> None:
    """Raise a 400 ApiError if a request asks for too many answers at once."""
    if num_prompts * options.num_candidates > MAX_CHOICES:
        name = "n" if options.best_of is None else "best_of"
        given = f"{num_prompts} prompts with {name} = {options.num_candidates}"
        raise invalid(param, f"{given} have more than {MAX_CHOICES} choices.")


def _requested(
    state: AppState, options: GenerationOptions, length: int, used: int, num_image_tokens: int
) -> str:
    """Describe a request that does not fit, whose prompt has `length` tokens."""
    longest = state.max_length()
    answer = options.max_tokens
    if answer and length <= longest:
        part = "its start" if state.start_token is not None else "in the prompt"
        if num_image_tokens:
            part += f", {num_image_tokens} of them for images"
        return f"you requested {used + answer} ({used} {part}, {answer} in the answer)"
    requested = prompt_alone(length, num_image_tokens)
    if length == longest and not answer:
        requested += ", which leaves no room for one more"
    return requested


def check_prompt_logprobs(options: GenerationOptions, num_tokens: int) -> None:
    """Raise a 400 ApiError if prompts of `num_tokens` tokens have too many logprobs.

    A prompt is computed quickly, so its logprobs could take gigabytes at once.
    """
    entries = num_tokens * options.num_candidates * (options.num_prompt_logprobs + 1)
    if entries <= MAX_PROMPT_LOGPROBS:
        return
    name = "prompt_logprobs"
    if options.num_prompt_logprobs == options.num_logprobs:
        name = "logprobs"
    message = (
        f"{num_tokens} tokens of prompts have {entries} log-probabilities for all choices, more "
        f"than the {MAX_PROMPT_LOGPROBS} of a request."
    )
    raise invalid(name, message)


def check_answer_logprobs(options: GenerationOptions, token_limits: Sequence[int]) -> None:
    """Raise a 400 ApiError if a whole answer may have too many logprobs.

    Without a stream they are held until the end. One choice is always allowed, because the
    context bounds it.
    """
    choices = len(token_limits) * options.num_candidates
    held = options.num_logprobs + 1  # per token
    name = "logprobs"
    if options.num_candidates > options.n and not held:
        held = 1
        name = "best_of"
    entries = sum(token_limits) * options.num_candidates * held
    if options.stream or choices == 1 or entries <= MAX_ANSWER_LOGPROBS:
        return
    message = (
        f"{choices} choices of up to {max(token_limits)} tokens may have {entries} "
        f"log-probabilities, more than the {MAX_ANSWER_LOGPROBS} of an answer: stream it, or "
        "ask for less with max_tokens."
    )
    raise invalid(name, message)
