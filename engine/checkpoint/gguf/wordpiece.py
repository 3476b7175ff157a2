"""BERT's WordPiece tokenizer in a GGUF file.

llama.cpp's converter marks the tokens that begin a word with SPACE. A checkpoint marks the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.checkpoint.gguf.end_tokens import CONTINUED, KEY, token_id
from engine.errors import ConfigError

LONGEST_WORD = 1 << 20  # characters; llama.cpp has no limit, and BERT's own is 100
NORMALIZER = f"{KEY}normalizer."


def wordpiece(settings: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of tokens as a checkpoint has them.

    Raises ConfigError if the file does not name the special tokens.
    """
    ids = {name: token_id(settings, name, len(tokens)) for name in ("bos", "seperator", "unknown")}
    if missing := [name for name, number in ids.items() if number is None]:
        raise ConfigError(f"The GGUF file lacks {KEY}{missing[0]}_token_id, which BERT needs.")
    named = {name: tokens[number] for name, number in ids.items() if number is not None}
    model = models.WordPiece(
        {token: number for number, token in enumerate(tokens)},
        unk_token=named["unknown"],
        max_input_chars_per_word=LONGEST_WORD,
        continuing_subword_prefix=CONTINUED,
    )
    tokenizer = Tokenizer(model)
    lowercase = bool(settings.get(f"{NORMALIZER}lowercase", True))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=bool(settings.get(f"{NORMALIZER}strip_accents", lowercase)),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(CONTINUED)
    first, last = named["bos"], named["seperator"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, tokens.index(token)) for token in (first, last)],
    )
    return tokenizer
