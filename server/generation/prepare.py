"""PreparedRequest: one request, checked against the model and tokenised. Nothing is sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from engine.protocol.generate import Ablation, Image, SamplingParams
from server.generation.cache_salt import cache_salt_of
from server.generation.limits import (
    check_answer_logprobs,
    check_choices,
    check_min_tokens,
    check_no_images,
    check_priority,
    check_prompt_logprobs,
    check_token_ids,
    token_limit,
)
from server.generation.options import GenerationOptions
from server.generation.prompts import Echo
from server.generation.sampling import check_first_tokens, check_option_tokens, sampling_params
from server.generation.truncation import truncated
from server.http.access_log import AccessRecord
from server.http.body import ignored_header
from server.http.errors import unsupported
from server.http.rate_limits import RateLimiter
from server.state import AppState
from server.text.answers import Parsing
from server.text.content_parts import ChatImages


@dataclass(frozen=True)
class PreparedRequest:
    """One HTTP request, ready to be submitted.

    Choice `prompt * n + k` is the k-th answer to a prompt.
    """

    model: str  # the name for the response
    fingerprint: str  # equal for equal models and versions
    options: GenerationOptions
    prompts: list[list[int]]
    params: list[SamplingParams]  # of the first choice of each prompt
    # First token of the answers of an encoder–decoder, whose encoder reads the prompts. None for
    # other models.
    start_token: int | None
    echoes: list[Echo] | None  # texts that the answers begin with, one per prompt
    ignored: list[str]  # names of request fields without effect, for the response header
    adjusted: dict[str, int]  # values that took the place of parameters, for the response header
    arrival: float  # CLOCK_MONOTONIC seconds
    request_id: str
    headers: Headers  # of the request; they may name the trace that it belongs to
    salt: str  # only requests of equal salt share cached prefixes
    tenant: str = ""  # the owner of the request's key; "" if there is at most one key
    adapter: int = 0  # its number in the engine; 0: the base model alone
    parsing: Parsing | None = None  # None: the answers are plain text
    limiter: RateLimiter | None = None  # of the request's key, if it has limits
    access: AccessRecord = field(default_factory=AccessRecord)  # of the access log
    ablation: Ablation | None = None  # None: the whole model
    images: tuple[Image, ...] = ()  # of the one prompt

    @property
    def without_pixels(self) -> PreparedRequest:
        """The same request for all that goes on once it is sent: pixels take megabytes."""
        if not self.images:
            return self
        return replace(self, images=tuple(image.without_pixels for image in self.images))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.options.n

    @property
    def notes(self) -> dict[str, str]:
        """The response headers that tell what became of the request's fields."""
        notes = ignored_header(self.ignored)
        if self.adjusted:
            values = [f"{name}={value}" for name, value in self.adjusted.items()]
            notes["x-adjusted-params"] = ", ".join(values)
        return notes

    def prompt_of(self, choice: int) -> int:
        """Return the index of the prompt that a choice answers."""
        return choice // self.options.n

    def first_choice_of(self, choice: int) -> int:
        """Return the first choice that answers the same prompt as `choice`."""
        return choice - choice % self.options.n

    def computes_prompt_logprobs(self, choice: int) -> bool:
        """Return whether the engine computes the prompt's logprobs for this choice.

        Once per prompt is enough, except in a stream: it must not hold back the first tokens of a
        choice until those of another arrive.
        """
        if self.options.num_prompt_logprobs < 0:
            return False
        return self.options.stream or choice == self.first_choice_of(choice)


def prepare(
    state: AppState,
    request: Request,
    options: GenerationOptions,
    prompts: list[list[int]],
    *,
    param: str,
    echoes: list[Echo] | None = None,
    ignored: Sequence[str] = (),
    parsing: Parsing | None = None,
    shown: ChatImages | None = None,
) -> PreparedRequest:
    """Check everything that depends on the model, and return the request to submit.

    `param` names the prompt's field in error messages. Raises a 400 or 404 ApiError.
    """
    _check_support(state, request, options, echoes)
    salt = cache_salt_of(request, options.cache_salt)
    images = _images_of(state, prompts, shown, salt, param)
    check_option_tokens(state, options)
    check_choices(options, len(prompts), param)
    given = prompts
    prompts = [truncated(state, options, prompt) for prompt in given]
    token_limits = _token_limits(state, options, prompts, shown, param)
    adjusted = {}
    if options.max_tokens is not None and max(token_limits) < options.max_tokens:
        adjusted["max_tokens"] = max(token_limits)
    check_min_tokens(state, options, token_limits)
    if min(token_limits) < options.min_tokens:
        adjusted["min_tokens"] = min(token_limits)
    if prompts != given:
        _check_truncation(images)
        adjusted["truncate_prompt_tokens"] = max(map(len, prompts))
    check_prompt_logprobs(options, sum(map(len, prompts)))
    check_answer_logprobs(options, token_limits)
    params = sampling_params(state, options)
    check_first_tokens(state, params)
    adapter = state.adapters.find(options.model)
    model = state.model_name(options.model)
    return PreparedRequest(
        model=model,
        adapter=0 if adapter is None else adapter.id,
        fingerprint=state.fingerprint_of(state.loaded(), adapter),
        options=options,
        prompts=prompts,
        params=[_within(params, limit) for limit in token_limits],
        start_token=state.start_token,
        echoes=echoes,
        parsing=parsing,
        images=images,
        ignored=list(ignored),
        adjusted=adjusted,
        arrival=request.state.arrival,
        request_id=request.state.request_id,
        headers=request.headers,
        salt=salt,
        tenant=request.state.tenant,
        limiter=request.state.limiter,
        access=_access_record(request, model, prompts),
    )


def _access_record(request: Request, model: str, prompts: list[list[int]]) -> AccessRecord:
    """Return the request's record of the access log, with its model and size."""
    access: AccessRecord = request.state.access
    access.model = model
    access.prompt_tokens = sum(map(len, prompts))
    return access


def _images_of(
    state: AppState,
    prompts: Sequence[Sequence[int]],
    shown: ChatImages | None,
    salt: str,
    param: str,
) -> tuple[Image, ...]:
    """Check the tokens of the prompts; return the images of the one prompt of a chat."""
    images = () if shown is None else shown.placed(prompts[0], salt)
    for prompt in prompts:
        check_token_ids(state, prompt, param)
        if not images:
            check_no_images(state, prompt, param)
    return images


def _token_limits(
    state: AppState,
    options: GenerationOptions,
    prompts: Sequence[Sequence[int]],
    shown: ChatImages | None,
    param: str,
) -> list[int]:
    """Return how many tokens may be generated for each prompt. Raises a 400 ApiError."""
    num_image_tokens = 0 if shown is None else shown.num_tokens
    return [token_limit(state, options, prompt, param, num_image_tokens) for prompt in prompts]


def _check_truncation(images: Sequence[Image]) -> None:
    """Raise a 400 ApiError if a prompt that is cut has images."""
    if images:
        message = "A prompt with images cannot be truncated; send a shorter one."
        raise unsupported("truncate_prompt_tokens", message)


def _within(params: SamplingParams, limit: int) -> SamplingParams:
    """Return the parameters of a prompt whose answers have at most `limit` tokens."""
    least = min(params.min_tokens, limit)
    return msgspec.structs.replace(params, max_tokens=limit, min_tokens=least)


def _check_support(
    state: AppState, request: Request, options: GenerationOptions, echoes: list[Echo] | None
) -> None:
    """Raise a 400 ApiError for a priority that the key may not have, or for another request that
    needs answers that continue the prompt."""
    check_priority(request, options.priority)
    if state.start_token is None:
        return
    message = "This model's answers do not continue the prompt."
    if echoes:
        raise unsupported("echo", message)
    if options.num_prompt_logprobs >= 0:
        raise unsupported("prompt_logprobs", message)
