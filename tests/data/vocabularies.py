"""The tokenizers of this folder: four kinds with small vocabularies, trained on the tales."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tests.data.tales import tale

TALES, SEED = 2000, 1
SPACE = "▁"
# Other scripts and programs, for tokens of characters and of code.
OTHERS = [
    "def f(x): return x", "é è à ü ö ä", "日本 日本語 你好", "1, 2, 3, 10, 20",
    "Dan loves icecream", "Dan älskar glass", '{"name": "f", "a": [1]}', "the day the end",
    "Привет мир",
]  # fmt: skip
# Made-up words of these and made-up rows of emoji leave vocabularies with parts of both.
SYLLABLES = [
    "un", "aff", "able", "re", "mar", "ing", "est", "lo", "ka", "tion", "per", "so", "bel", "ish",
    "dor", "in", "fa", "ness", "qui", "ver", "zo", "gra", "ly", "hum", "pre", "tor", "wen", "ous",
]  # fmt: skip
CALL_MARKS = ["<tool_call>", "</tool_call>"]
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tales() -> list[str]:
    """The text that all vocabularies are trained on; most of them also on OTHERS."""
    random = Random(SEED)
    return [tale(random) for _ in range(TALES)]


def texts() -> list[str]:
    random = Random(SEED)
    made_up = []
    for _ in range(4000):
        word = "".join(random.choices(SYLLABLES, k=random.randint(2, 4)))
        made_up.append(f"{word} {chr(random.randrange(0x1F440, 0x1F480))}")
    return tales() + OTHERS * 100 + made_up


def around(begin: str, end: str, ids: Iterable[tuple[str, int]]) -> TemplateProcessing:
    """Add these special tokens at the ends of every text."""
    return TemplateProcessing(single=f"{begin} $A {end}".strip(), special_tokens=list(ids))


def byte_level() -> Tokenizer:
    """BPE over bytes, as in GPT-2, with the marks of ChatML and of tool calls as tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens(ENDS)
    tokenizer.add_tokens(CALL_MARKS)
    return tokenizer


def byte_fallback(size: int = 512) -> Tokenizer:
    """SentencePiece's BPE as in Llama 2: characters outside the vocabulary become byte tokens."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(heads), limit_alphabet=70, show_progress=False
    )
    learned.train_from_iterator(tales(), trainer)
    model = json.loads(learned.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    pieces = [*heads, *merged, *(piece for piece in model["vocab"] if piece not in set(merged))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[(first, second) for first, second in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
    back = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence(
        [back, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(heads[:3])
    tokenizer.post_processor = around("<s>", "", [("<s>", 1)])
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece over lower-case words, as in BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=special, continuing_subword_prefix="##", show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.post_processor = around("[CLS]", "[SEP]", [("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's unigram model, as in T5, with one of its sentinel tokens at the end."""
    tokenizer = Tokenizer(models.Unigram())
    squeezed = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), squeezed])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens(["<extra_id_0>"])
    tokenizer.post_processor = around("", "</s>", [("</s>", 1)])
    return tokenizer
