"""Fill-in-the-middle: the special tokens of models that write the text between two others.

A prompt is BEFORE text SUFFIX text MIDDLE, and the answer follows. This order is that of "Efficient
Training of Language Models to Fill in the Middle" (arXiv 2207.14255), PSM.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


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


def infill_tokens(backend: tokenizers.Tokenizer) -> InfillTokens | None:
    """Return the tokens for fill-in-the-middle, or None if the vocabulary lacks one of them."""
    for before, suffix, middle in FORMATS:
        ids = [backend.token_to_id(token) for token in (before, suffix, middle)]
        # A token that a text cannot contain as one would be read as several.
        if None in ids or backend.encode(middle, add_special_tokens=False).ids != ids[2:]:
            continue
        ends = [backend.token_to_id(token) for token in ENDS]
        return InfillTokens(before, suffix, middle, tuple(end for end in ends if end is not None))
    return None
