"""Fill-in-the-middle: the special tokens of models that write the text between two others.

A prompt is BEFORE text SUFFIX text MIDDLE, and the answer follows. This order is that of "Efficient
Training of Language Models to Fill in the Middle" (arXiv 2207.14255), PSM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from server.generation.options import GenerationOptions
from server.generation.prompts import Prompts
from server.http.errors import invalid, unsupported
from server.state import AppState
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class InfillTokens:
    """The texts of a model's special tokens for fill-in-the-middle."""

    before: str
    suffix: str
    middle: str
    end_ids: tuple[int, ...] = ()  # tokens that end the middle, besides the end tokens


# Names in published vocabularies: Qwen2.5-Coder and CodeGemma, StarCoder and Granite, Code Llama,
# DeepSeek-Coder, GLM-4.
FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
# Instruct models end a chat with another token than a document.
ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|file_separator|>", "<|file_sep|>", "<|repo_name|>"),
    *("▁<EOT>", "<EOT>", "<fim_pad>"),
)


@lru_cache(maxsize=1)  # of the served model: pages ask every two seconds
def infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Return the tokens for fill-in-the-middle, or None if the vocabulary lacks one of them."""
    for before, suffix, middle in FORMATS:
        ids = [tokenizer.token_id(token) for token in (before, suffix, middle)]
        # A token that a text cannot contain as one would be read as several.
        if None in ids or tokenizer.encode(middle, add_special_tokens=False) != ids[2:]:
            continue
        ends = [tokenizer.token_id(token) for token in ENDS]
        return InfillTokens(before, suffix, middle, tuple(end for end in ends if end is not None))
    return None


def infill_prompts(
    state: AppState, prompts: Prompts, suffix: str, *, param: str = "suffix"
) -> tuple[str, ...]:
    """Return prompts that are answered with the text between each of `prompts` and `suffix`.

    `param` names the field of the suffix in errors.
    Raises a 400 ApiError if the model knows no fill-in-the-middle, if a prompt is no text, or if
    all texts together are longer than a body may be.
    """
    tokens = infill_tokens(state.tokenizer)
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
    tokens = infill_tokens(state.tokenizer)
    if tokens is None or options.ignore_eos:
        return options
    return replace(options, stop_token_ids=(*options.stop_token_ids, *tokens.end_ids))
