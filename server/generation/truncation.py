"""truncate_prompt_tokens: only the last, or the first, tokens of a prompt are read."""

from __future__ import annotations

from server.generation.options import GenerationOptions
from server.state import AppState

WHOLE_CONTEXT = -1  # value of truncate_prompt_tokens


def truncated(state: AppState, options: GenerationOptions, prompt: list[int]) -> list[int]:
    """Return the last tokens of `prompt`, as many as the request asks for, or the first ones.

    A BOS token at the start stays and counts, because many models fail without it.
    """
    most = _most_tokens(state, options)
    if most is None or len(prompt) <= most:
        return prompt
    if options.keeps_start:
        return prompt[:most]
    if most > 1 and prompt[0] == state.tokenizer.bos_token_id:
        return [prompt[0], *prompt[1 - most :]]
    return prompt[-most:]


def _most_tokens(state: AppState, options: GenerationOptions) -> int | None:
    """Return how many tokens of a prompt are read; None: all.

    -1 leaves the answer the room that it asks for, but at most half of the context.
    """
    if options.truncate_prompt_tokens != WHOLE_CONTEXT:
        return options.truncate_prompt_tokens
    longest = state.max_length()
    if state.start_token is not None:  # the answer does not share its context
        return longest
    answer = options.max_tokens or options.default_max_tokens or 1
    return longest - min(answer, longest // 2)
