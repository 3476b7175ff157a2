"""Which two tokens of a vocabulary score a pair, and folders that name none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.logit_score import LogitScoreConfig, read_logit_score
from engine.errors import ConfigError
from tests.support.driver import tiny_llama
from tests.support.golden import load
from tests.support.tiny_bert import tiny_bert

BASE = "sentence_transformers"
MODULES = [
    {"type": f"{BASE}.base.modules.transformer.Transformer", "path": ""},
    {"type": f"{BASE}.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"},
]


def with_module(folder: Path, **config: Any) -> Path:
    (folder / "1_LogitScore").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    return folder


def with_vocabulary(folder: Path, **file: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder


def test_read_logit_score_of_modules_json(tmp_path: Path) -> None:
    folder = with_module(tmp_path, true_token_id=7, false_token_id=3)
    assert read_logit_score(folder, None) == LogitScoreConfig(7, 3)
    assert read_logit_score(folder, "logit_score") == LogitScoreConfig(7, 3)


@pytest.mark.parametrize(
    "file",
    [
        {"model": {"vocab": {"no": 2, "yes": 5}}},
        {"model": {"vocab": [["a", 0], ["b", 0], ["no", -1], ["c", 0], ["d", 0], ["yes", -2]]}},
        {"model": {"vocab": {"no": 2}}, "added_tokens": [{"content": "yes", "id": 5}]},
    ],
)
def test_read_logit_score_by_the_flag_takes_yes_and_no(
    tmp_path: Path, file: dict[str, Any]
) -> None:
    folder = with_vocabulary(tmp_path, **file)
    assert read_logit_score(folder, "logit_score") == LogitScoreConfig(5, 2)
    assert read_logit_score(folder, None) is None
    assert read_logit_score(folder, "mean") is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({}, "true_token_id = None"),
        ({"true_token_id": "yes"}, "true_token_id = 'yes'"),
        ({"true_token_id": 1, "false_token_id": True}, "false_token_id = True"),
        ({"true_token_id": 1, "module_input_name": "scores"}, "module_input_name"),
    ],
)
def test_read_logit_score_bad_config_raises_error_naming_it(
    tmp_path: Path, config: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        read_logit_score(with_module(tmp_path, **config), None)


def test_read_logit_score_vocabulary_without_the_words_raises_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token 'no'"):
        read_logit_score(with_vocabulary(tmp_path, model={"vocab": {"yes": 1}}), "logit_score")


def test_load_logit_score_that_does_not_fit_raises_error(tmp_path: Path) -> None:
    bert = with_vocabulary(tiny_bert(tmp_path / "bert"), model={"vocab": {"no": 2, "yes": 5}})
    with pytest.raises(ConfigError, match="needs a decoder"):
        load(bert, pooling="logit_score")
    llama = with_module(tiny_llama(tmp_path / "llama"), true_token_id=10**6)
    with pytest.raises(ConfigError, match="token 1000000; the vocabulary has"):
        load(llama)
