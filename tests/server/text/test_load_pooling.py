"""Pooling settings in sentence-transformers files: those read, and those refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.text.load_pooling import load_pooling

MODELS = "sentence_transformers.models"


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def modules(*types: str) -> list[dict[str, Any]]:
    return [{"idx": i, "path": f"{i}_M" if i else "", "type": t} for i, t in enumerate(types)]


OLD = modules(f"{MODELS}.Transformer", f"{MODELS}.Pooling", f"{MODELS}.Normalize")
NEW = modules(
    "sentence_transformers.base.modules.transformer.Transformer",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
)
SWITCHES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")


def switches(*on: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{s}": s in on for s in SWITCHES}


@pytest.mark.parametrize(
    ("listed", "pooling", "mode", "normalised"),
    [
        (OLD, switches("mean_tokens"), "mean", True),
        (OLD[:2], switches("cls_token"), "cls", False),
        (OLD, switches("lasttoken"), "last", True),
        (OLD, switches(), "mean", True),
        (NEW, {"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last", False),
        (NEW, {"pooling_mode": ["cls"], "pooling_mode_mean_tokens": True}, "cls", False),
    ],
)
def test_from_folder_reads_mode_and_normalisation(
    tmp_path: Path, listed: Any, pooling: Any, mode: str, normalised: bool
) -> None:
    write(tmp_path, "modules.json", listed)
    write(tmp_path, "1_M/config.json", pooling)
    config = load_pooling(tmp_path)
    assert (config.mode, config.normalised) == (mode, normalised)
    assert (config.longest, config.lowercase) == (None, False)
    assert config.longest is None


def test_from_folder_without_modules_json_uses_mean_pooling(tmp_path: Path) -> None:
    config = load_pooling(tmp_path)
    assert (config.mode, config.normalised, config.longest) == ("mean", False, None)
    assert str(config) == "mean pooling, not normalised (no modules.json)"


def test_limit_uses_configured_maximum_length(tmp_path: Path) -> None:
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": True})
    config = load_pooling(tmp_path)
    assert (config.longest, config.lowercase) == (128, True)
    assert config.longest == 128
    assert load_pooling(tmp_path, 300).longest == 300, "an explicit limit wins"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("1_M/config.json", switches("cls_token", "mean_tokens"), ["cls and mean", "one of cls"]),
        ("1_M/config.json", switches("max_tokens"), ["pooling max"]),
        ("1_M/config.json", switches("mean_sqrt_len_tokens"), ["pooling mean_sqrt_len_tokens"]),
        ("1_M/config.json", {"pooling_mode_new": True}, ["pooling new"]),
        ("1_M/config.json", {"pooling_mode": "weightedmean"}, ["pooling weightedmean"]),
        ("1_M/config.json", {"pooling_mode": ["cls", "mean"]}, ["cls and mean"]),
        ("1_M/config.json", "[]", ["1_M/config.json"]),
        ("modules.json", [*OLD[:2], {"path": "2", "type": f"{MODELS}.Dense"}, OLD[2]], ["Dense"]),
        ("modules.json", [{"path": "", "type": "custom_st.Transformer"}, OLD[1]], ["custom_st"]),
        ("modules.json", OLD[:1], ["lists Transformer;"]),
        ("modules.json", [{**OLD[0], "path": "0_BERT"}, OLD[1]], ["'0_BERT'"]),
        ("modules.json", {}, ["modules.json"]),
        ("modules.json", "[1]", ["modules.json"]),
        ("modules.json", "[", ["modules.json"]),
        ("sentence_bert_config.json", {"max_seq_length": "256"}, ["max_seq_length = '256'"]),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            ["default_prompt_name = 'query'", "null"],
        ),
    ],
)
def test_from_folder_unsupported_setting_raises_error_naming_it(
    tmp_path: Path, name: str, content: Any, said: list[str]
) -> None:
    write(tmp_path, "modules.json", OLD)
    write(tmp_path, "1_M/config.json", switches("mean_tokens"))
    write(tmp_path, "config_sentence_transformers.json", {"default_prompt_name": None})
    load_pooling(tmp_path)
    write(tmp_path, name, content)
    with pytest.raises(ConfigError) as caught:
        load_pooling(tmp_path)
    for part in (name, *said):
        assert part in str(caught.value)


def test_from_folder_missing_pooling_config_raises_error_naming_it(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", OLD)
    with pytest.raises(ConfigError, match=r"1_M/config\.json"):
        load_pooling(tmp_path)
