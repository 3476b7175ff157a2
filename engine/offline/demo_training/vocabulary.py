"""The tokenizers of the demo models, and the tokens of a rendered chat."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from engine.offline.demo_training.chat import KEY, SPECIAL_TOKENS, SPOKEN, render_text
from engine.offline.demo_training.network import Example
from engine.offline.demo_training.text import Conversation

LETTERS = string.ascii_letters + "åäöÅÄÖéü"


def chat_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens.

    It contains all 256 bytes, every digit is its own token, and the first ids are special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def translate_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of T5's form: word pieces, the first with a space; </s> ends every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.NFC()
    pieces = pre_tokenizers.Metaspace()
    marks = pre_tokenizers.Punctuation("isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, marks])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=list(LETTERS + string.digits + "▁.,!?'-"),
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = ("</s>", 1)
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[end])
    return tokenizer


def encode(tokenizer: Tokenizer, conversation: Conversation, limit: int) -> Example:
    """Return the first `limit` tokens of a conversation."""
    text = render_text(conversation.messages, conversation.tools, effort=conversation.effort)
    example = encode_text(tokenizer, text, is_held=conversation.is_held)
    return Example(example.ids[:limit], example.learned[:limit])


def encode_text(tokenizer: Tokenizer, text: str, *, is_held: bool = False) -> Example:
    """Return the token ids of a rendered chat, and a mask of the assistant's, which are learned.

    With `is_held` a grammar holds the answers, which are JSON: only their values are learned.
    """
    ids: list[int] = []
    learned: list[bool] = []
    for index, piece in enumerate(SPOKEN.split(text)):
        is_spoken = index % 2 == 1
        encoding = tokenizer.encode(piece)
        ids += encoding.ids
        if is_spoken and is_held:
            learned += outside_keys(piece, encoding.offsets)
        else:
            learned += [is_spoken] * len(encoding.ids)
    return Example(ids, learned)


def outside_keys(text: str, offsets: Iterable[tuple[int, int]]) -> list[bool]:
    """Return for each token of a JSON text whether a part of it lies outside the keys."""
    is_free = [True] * len(text)
    for key in KEY.finditer(text):
        for index in range(*key.span()):
            is_free[index] = False
    return [any(is_free[start:end]) for start, end in offsets]
