"""Texts as prompts, and the echoes that answers begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from server.generation.limits import context_exceeded
from server.generation.off_loop import off_loop
from server.generation.options import GenerationOptions
from server.http.errors import invalid, unsupported
from server.state import AppState
from server.text.detokenizer import Detokenizer

Prompts = Sequence[str | list[int]]  # texts or their token ids


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, and the number of characters before each of its tokens."""

    text: str
    offsets: list[int]  # empty if the request asks for no logprobs


async def text_prompts(state: AppState, prompts: Prompts) -> list[list[int]]:
    """Return the token ids of each prompt. Raises a 400 ApiError if one is far too long.

    An empty text begins a new document, as OpenAI's default prompt does: it becomes the BOS token,
    or the EOS token if there is no BOS token.
    """

    def ids_of(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return encode_prompt(state, prompt, "prompt") or state.tokenizer.document_start
        return prompt

    return await off_loop(sum(map(len, prompts)), lambda: [ids_of(prompt) for prompt in prompts])


def encode_prompt(
    state: AppState, text: str, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of `text`. `param` names its field in the request.

    Raises a 400 ApiError without tokenising the rest if the first part alone is too long.
    """
    longest = state.max_length()
    count = state.tokenizer.far_over(text, longest)
    if count:
        raise context_exceeded(longest, f"the prompt alone has {count}", param)
    return state.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def infill_prompts(
    state: AppState, prompts: Prompts, suffix: str, *, param: str = "suffix"
) -> tuple[str, ...]:
    """Return prompts that are answered with the text between each of `prompts` and `suffix`.

    `param` names the field of the suffix in errors.
    Raises a 400 ApiError if the model knows no fill-in-the-middle, if a prompt is no text, or if
    all texts together are longer than a body may be.
    """
    tokens = state.tokenizer.infill
    if tokens is None:
        message = f"{param} is not supported: this model has no fill-in-the-middle tokens."
        raise unsupported(param, message)
    most = state.config.max_body_bytes
    if sum(map(len, prompts)) + len(prompts) * len(suffix) > most:
        message = f"The prompts, each with the suffix, have more than {most} characters."
        raise invalid(param, message)
    infilled = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise unsupported(param, f"{param} needs a prompt that is a text, not token ids.")
        infilled.append(f"{tokens.before}{prompt}{tokens.suffix}{suffix}{tokens.middle}")
    return tuple(infilled)


def with_infill_ends(state: AppState, options: GenerationOptions) -> GenerationOptions:
    """Return `options` with the tokens that end an infilled text as stop tokens."""
    tokens = state.tokenizer.infill
    if tokens is None or options.ignore_eos:
        return options
    return replace(options, stop_token_ids=(*options.stop_token_ids, *tokens.end_ids))


async def make_echoes(state: AppState, options: GenerationOptions, prompts: Prompts) -> list[Echo]:
    """Return the text of each prompt. Token ids are decoded like those of the answer."""
    return await off_loop(
        sum(map(len, prompts)), lambda: [_echo(state, options, prompt) for prompt in prompts]
    )


def _echo(state: AppState, options: GenerationOptions, prompt: str | list[int]) -> Echo:
    with_offsets = options.num_logprobs >= 0
    if isinstance(prompt, str):
        offsets = (state.tokenizer.offsets(prompt) or [0]) if with_offsets else []
        return Echo(prompt, offsets)
    skip = options.skip_special_tokens
    offsets = _offsets(state, prompt, skip=skip) if with_offsets else []
    return Echo(state.tokenizer.decode(prompt, skip_special_tokens=skip), offsets)


def _offsets(state: AppState, ids: list[int], *, skip: bool) -> list[int]:
    """Return the number of characters before each token of `ids`."""
    detokenizer = Detokenizer(state.tokenizer, skip_special_tokens=skip)
    lengths = [len(detokenizer.push(token)) for token in ids[:-1]]
    return [0, *accumulate(lengths)]
