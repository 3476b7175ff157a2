"""Variants of a sentence-transformers folder around a tiny BERT or Qwen3: how each makes vectors.

`tests/data/sentences.json` has the vectors that sentence-transformers gives them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.sentence_folder import Dense, sentence_folder
from tests.support.tiny_bert import tiny_bert
from tests.support.tiny_qwen3 import tiny_qwen3

HIDDEN = 12
TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
TEXTS = (
    "How do I bake bread?",
    "the",
    "A recipe for sourdough: flour, water, salt, and a long night of rest in a cold place.",
)
PROMPTS = {"query": "query: the ", "document": "", "passage": "passage: "}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
SWITCHES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "lasttoken")


@dataclass(frozen=True)
class SentenceCase:
    """A folder and the arguments of `encode`; without `pooling` it has no modules.json."""

    name: str
    pooling: dict[str, Any] | None
    behind: tuple[str | Dense, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # config_sentence_transformers.json
    transformer: dict[str, Any] = field(default_factory=dict)  # sentence_bert_config.json
    model_max_length: int | None = 512  # of the tokenizer; the model has 64 positions
    encode: dict[str, Any] = field(default_factory=dict)
    decoder: dict[str, Any] | None = None  # arguments of tiny_qwen3, if that makes the vectors

    def write(self, folder: Path) -> Path:
        """Write the folder and return it."""
        plain = folder.with_name(folder.name + "-plain")
        if self.decoder is None:
            tiny_bert(plain, **BERT)
            shutil.copy(TOKENIZERS / "wordpiece" / "tokenizer.json", plain)
        else:
            tiny_qwen3(plain, **self.decoder)
            _write_qwen3_tokenizer(plain / "tokenizer.json")
        names = TOKENS if self.decoder is None else END
        tokenizer = names | {"model_max_length": self.model_max_length}
        (plain / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        if self.pooling is None:
            return plain
        size = HIDDEN if self.decoder is None else 16
        sentence_folder(plain, folder, {"embedding_dimension": size} | self.pooling, *self.behind)
        (folder / "config_sentence_transformers.json").write_text(json.dumps(self.settings))
        (folder / "sentence_bert_config.json").write_text(json.dumps(self.transformer))
        return folder


def _write_qwen3_tokenizer(path: Path) -> None:
    """Write a tokenizer that ends each text, as Qwen3-Embedding's does."""
    tokenizer = json.loads((TOKENIZERS / "byte-level" / "tokenizer.json").read_text())
    end = END["eos_token"]
    (number,) = (token["id"] for token in tokenizer["added_tokens"] if token["content"] == end)
    text = {"Sequence": {"id": "A", "type_id": 0}}
    last = {"SpecialToken": {"id": end, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [text, last],
        "pair": [text, last],
        "special_tokens": {end: {"id": end, "ids": [number], "tokens": [end]}},
    }
    path.write_text(json.dumps(tokenizer))


BERT = {
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_attention_heads": 3,
    "vocab_size": 600,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TOKENS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
END = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "add_eos_token": False,  # the template ends a text all the same
}
ALL_OLD: dict[str, Any] = {f"pooling_mode_{name}": True for name in SWITCHES}
OLD_MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
MEAN = {"pooling_mode": "mean"}
QUERY: dict[str, Any] = {"settings": {"prompts": PROMPTS}, "encode": {"prompt_name": "query"}}
LEFT_OUT = {"include_prompt": False}
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
CASES = (
    SentenceCase("bare", None),
    *(SentenceCase(f"pool {mode}", {"pooling_mode": mode}) for mode in MODES),
    SentenceCase("pool all by old switches", ALL_OLD),
    SentenceCase("pool a list", {"pooling_mode": ["weightedmean", "cls"]}),
    SentenceCase("no mode", {}),
    SentenceCase("normalised", OLD_MEAN, ("Normalize",)),
    *(
        SentenceCase(f"dense {name}", MEAN, (Dense(HIDDEN, 6, name, name != "ReLU"),))
        for name in ACTIVATIONS
    ),
    SentenceCase(
        "normalised, dense, dense, normalised",
        {"pooling_mode": ["cls", "mean"]},
        ("Normalize", Dense(2 * HIDDEN, 8), Dense(8, 5, "Identity"), "Normalize"),
    ),
    SentenceCase("prompt by name", MEAN, ("Normalize",), **QUERY),
    SentenceCase(
        "default prompt",
        MEAN,
        settings={"prompts": PROMPTS, "default_prompt_name": "passage"},
    ),
    SentenceCase(
        "empty prompt in place of the default one",
        MEAN,
        settings={"prompts": PROMPTS, "default_prompt_name": "passage"},
        encode={"prompt": ""},
    ),
    SentenceCase("prompt as text", {"pooling_mode": "cls"}, encode={"prompt": "the flour of "}),
    *(
        SentenceCase(f"prompt left out, {mode}", LEFT_OUT | {"pooling_mode": mode}, **QUERY)
        for mode in MODES
    ),
    SentenceCase(
        "prompt left out, all normalised, dense",
        LEFT_OUT | {"pooling_mode": list(MODES)},
        ("Normalize", Dense(6 * HIDDEN, 4, "GELU")),
        **QUERY,
    ),
    SentenceCase("longest text of the module", MEAN, transformer={"max_seq_length": 9}),
    SentenceCase("longest text of the tokenizer", MEAN, model_max_length=7),
    SentenceCase("longest text of the model", MEAN, encode={"prompt": "the flour " * 40}),
    SentenceCase(
        "a prompt that fills the longest text",
        LEFT_OUT | {"pooling_mode": "mean"},
        transformer={"max_seq_length": 5},
        **QUERY,
    ),
    SentenceCase("lower case", MEAN, transformer={"do_lower_case": True}),
    SentenceCase("truncated", MEAN, ("Normalize",), settings={"truncate_dim": 5}),
    SentenceCase("truncated beyond its size", MEAN, settings={"truncate_dim": 100}),
    SentenceCase("a causal language model alone", None, decoder={}),
    SentenceCase("its trunk alone", None, decoder={"begins": ""}),
    SentenceCase(
        "Qwen3-Embedding",
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        ("Normalize",),
        decoder={},
        encode={"prompt_name": "query"},
        settings={"prompts": {"query": "Instruct: find passages\nQuery:", "document": ""}},
    ),
    SentenceCase(
        "a decoder, cut, its prompt left out",
        LEFT_OUT | {"pooling_mode": list(MODES)},
        (Dense(6 * 16, 6), "Normalize"),
        model_max_length=20,
        decoder={"begins": ""},
        **QUERY,
    ),
)
