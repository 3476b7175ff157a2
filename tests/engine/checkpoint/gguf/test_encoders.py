"""Encoders from GGUF files against `transformers`, and how their texts are split and pooled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.folder import model_folder
from engine.checkpoint.gguf.tokenizer import build_tokenizer
from engine.checkpoint.sentence import read_sentence
from engine.errors import ConfigError
from tests.engine.models import (
    test_bert,
    test_distilbert,
    test_embedding_gemma,
    test_jina_v3,
    test_modernbert,
    test_nomic_bert,
    test_qwen3,
    test_roberta,
)
from tests.support.changed_gguf import GGUFFile
from tests.support.driver import Driver
from tests.support.encoders import Encoder, EncoderCase, check_exact, hidden_states
from tests.support.gguf_encoders import write_encoder
from tests.support.gguf_files import write_gguf
from tests.support.golden import load, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
LARGER = {"vocab_size": 288}  # the tokens of tests/support/gguf_files.py
GEMMA = LARGER | {"query_pre_attn_scalar": 16}  # llama.cpp scales by the width of a head
PLAIN_ROPE = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
CASES: dict[str, tuple[str, Any]] = {
    "bert": ("bert", lambda: test_bert.config(**LARGER, layer_norm_eps=1e-3)),
    "xlm-roberta": ("bert", lambda: test_roberta.config(**LARGER)),
    "distilbert": ("bert", lambda: test_distilbert.config(**LARGER)),
    "nomic": ("nomic-bert", lambda: test_nomic_bert.config(**LARGER)),
    "jina-v3": ("jina-bert-v3", lambda: test_jina_v3.config(**LARGER)),
    "modernbert": ("modern-bert", lambda: test_modernbert.config(**LARGER)),
    "modernbert-silu": (
        "modern-bert",
        lambda: test_modernbert.config(**LARGER, hidden_activation="silu", local_attention=9),
    ),
    "embedding-gemma": (
        "gemma-embedding",
        lambda: test_embedding_gemma.config(**GEMMA, rope_parameters=PLAIN_ROPE),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.variants(3)
def test_hidden_states_equal_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    encoder = Encoder(EncoderCase(case, config), tmp_path / "checkpoint")
    runner = load(write_encoder(tmp_path / "model.gguf", encoder.folder, architecture))
    (hidden,) = hidden_states(runner, encoder.texts[-1:])
    if case == "xlm-roberta":  # llama.cpp counts padding tokens inside a text, too
        assert 1 not in encoder.texts[-1]
    check_exact(hidden, encoder.expected[-1])


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "cafe",
    "un",
    "##believ",
    "##able",
    "!",
    "##s",
    "a",
    "中",
]
SPECIAL = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"}
TEXTS = ["Unbelievable cafés!", "a中s  un\tbelieved", "CAFE", "", "x" * 300, "[CLS] a [SEP]"]


def of_gguf(**more: Any) -> dict[str, Any]:
    """Return a WordPiece as llama.cpp's converter writes it."""
    marked = [
        word if word in SPECIAL else word[2:] if word.startswith("##") else f"▁{word}"
        for word in WORDS
    ]
    ids = {"unknown": 1, "bos": 2, "seperator": 3, "padding": 0}
    settings = {
        "model": "bert",
        "tokens": marked,
        "token_type": [3 if word in SPECIAL else 1 for word in WORDS],
        **{f"{name}_token_id": number for name, number in ids.items()},
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (settings | more).items()}


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_splits_texts_like_the_tokenizer_of_bert(lowercase: bool) -> None:
    from transformers import BertTokenizer

    vocab = {word: number for number, word in enumerate(WORDS)}
    reference = BertTokenizer(vocab=vocab, do_lower_case=lowercase)
    more = {} if lowercase else {"normalizer.lowercase": False}
    found = build_tokenizer(of_gguf(**more))
    for text in TEXTS:
        assert found.encode(text).ids == reference(text)["input_ids"], text
    assert found.decode([5, 6, 7, 10]) == "unbelievable a"


@pytest.mark.parametrize("name", ["bos", "seperator", "unknown"])
def test_wordpiece_without_a_special_token_raises_config_error(name: str) -> None:
    """llama.cpp's default ids are those of BERT's vocabulary, which is larger."""
    settings = of_gguf()
    del settings[f"tokenizer.ggml.{name}_token_id"]
    with pytest.raises(ConfigError, match=f"{name}_token_id"):
        build_tokenizer(settings)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = lambda: test_modernbert.config(**LARGER)  # noqa: E731
    return Encoder(EncoderCase("modern", config), tmp_path_factory.mktemp("modern")).folder


@pytest.mark.parametrize(
    ("number", "pooling"), [(None, "mean"), (1, "mean"), (2, "cls"), (3, "lasttoken")]
)
def test_pooling_type_is_written_for_sentence_transformers(
    number: int | None, pooling: str, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {} if number is None else {"pooling_type": number}
    file = write_encoder(tmp_path / "model.gguf", checkpoint, "modern-bert", settings)
    found = read_sentence(model_folder(str(file)))
    assert (found.pooler.modes, found.is_normalized) == ((pooling,), True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pooling_type": 4}, "pooling_type = 4"),
        ({"pooling_type": 0}, "pooling_type = 0"),
        ({"attention.causal": True}, "attention.causal to True"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"attention.head_count_kv": 3}, "3 key/value heads"),
        ({"attention.sliding_window": -1}, "sliding_window = -1"),
        ({"attention.sliding_window_pattern": "x"}, "sliding_window_pattern = 'x'"),
        ({"classifier.output_labels": ["a"]}, "classifier.output_labels"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
    ],
    ids=str,
)
def test_unsupported_setting_raises_config_error(
    settings: dict[str, Any], said: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = write_encoder(tmp_path / "model.gguf", checkpoint, "modern-bert", settings)
    with pytest.raises(ConfigError, match=said):
        model_folder(str(file))


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (3, "last")])
def test_decoder_with_a_pooling_makes_the_vectors_of_the_checkpoint(
    number: int, pooling: str, tmp_path: Path
) -> None:
    """As Qwen3-Embedding's files. Without the setting, or with 0, it generates."""
    of_transformers(test_qwen3.config(**LARGER), tmp_path / "checkpoint")
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path / "checkpoint", "qwen3")
    assert Driver(plain).core.facts.kind == "decoder"
    file = GGUFFile(plain)

    def with_pooling(value: int) -> Path:
        file.settings["qwen3.pooling_type"] = value
        return file.write(tmp_path / f"{value}.gguf", "", np.zeros(1))

    found, due = Driver(with_pooling(number)), Driver(tmp_path / "checkpoint", pooling=pooling)
    ids = [driver.embed([5, 7, 9, 11]) for driver in (found, due)]
    for driver in (found, due):
        driver.run()
    assert found.embeddings[ids[0]].vector == due.embeddings[ids[1]].vector
    assert Driver(with_pooling(0)).core.facts.kind == "decoder"
    with pytest.raises(ConfigError, match="pooling_type = 4"):
        Driver(with_pooling(4))
