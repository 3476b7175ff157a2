"""Texts as prompts, and the echoes that answers begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from server.generation.limits import context_exceeded, prompt_alone
from server.generation.off_loop import off_loop
from server.generation.options import GenerationOptions
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
    state: AppState,
    text: str,
    param: str,
    *,
    add_special_tokens: bool = True,
    num_image_tokens: int = 0,
) -> list[int]:
    """Return the token ids of `text`. `param` names its field in the request.

    Raises a 400 ApiError without tokenising the rest if the first part alone is too long. It names
    the `num_image_tokens` of the text.
    """
    longest = state.max_length()
    count = state.tokenizer.far_over(text, longest)
    if count:
        raise context_exceeded(longest, prompt_alone(count, num_image_tokens), param)
    return state.tokenizer.encode(text, add_special_tokens=add_special_tokens)


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
