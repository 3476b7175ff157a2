"""A draft model's plan: what it takes, and which models cannot draft for which."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.folder import model_folder, model_name
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.draft_plan import DRAFT_SLOTS
from engine.memory.model_plan import ModelPlan
from engine.memory.report import DRAFT_KV_CACHE, DRAFT_WEIGHTS, ROWS, plan_memory
from engine.runner.load import load_engine
from tests.support.driver import tiny_llama
from tests.support.tiny_bert import tiny_bert


def config(model: Path | str, draft: Path | str, **fields: Any) -> EngineConfig:
    default = {"device": "cpu", "dtype": "float32", "threads": 1}
    return EngineConfig(model=str(model), speculative_model=str(draft), **(default | fields))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plans") / "draft", num_hidden_layers=1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"kv_cache_dtype": "int8", "attention_backend": "torch"},
        {"attention_backend": "torch", "prepack": False},
    ],
    ids=str,
)
def test_planned_bytes_of_a_draft_model_are_those_that_are_measured(
    checkpoint: Path, draft: Path, fields: dict[str, Any]
) -> None:
    loaded = load_engine(config(checkpoint, draft, **fields))
    entries = {entry.name: entry for entry in loaded.facts.memory}
    for name in (DRAFT_WEIGHTS, DRAFT_KV_CACHE, ROWS):
        assert entries[name].planned == entries[name].measured > 0
    assert loaded.facts.speculative_model == "draft"


def test_draft_model_takes_memory_from_the_kv_cache(checkpoint: Path, draft: Path) -> None:
    with_draft = plan_memory(ModelPlan(config(checkpoint, draft, block_size=16)))
    alone = plan_memory(ModelPlan(EngineConfig(model=str(checkpoint), device="cpu")))
    # One layer of keys and values: 2 heads of 8 numbers for each token of the slots and a block.
    tokens = DRAFT_SLOTS * 256 + 16
    assert with_draft.planned[DRAFT_KV_CACHE] == tokens * 2 * 2 * 8 * 4
    assert DRAFT_WEIGHTS not in alone.planned


def test_free_memory_for_blocks_is_what_both_models_leave(checkpoint: Path, draft: Path) -> None:
    free = 4 << 20
    both = ModelPlan(config(checkpoint, draft))
    reserved = sum(plan_memory(both).planned[name] for name in (DRAFT_WEIGHTS, DRAFT_KV_CACHE))
    assert both.plan_blocks(free, reserved)[0] < both.plan_blocks(free)[0]


def test_draft_model_with_a_shorter_context_is_planned_with_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    short = tiny_llama(tmp_path / "short", max_position_embeddings=64)
    planned = ModelPlan(config(checkpoint, short)).draft
    assert planned is not None
    assert planned.max_model_len == 64
    limited = ModelPlan(config(checkpoint, short, max_model_len=32)).draft
    assert limited is not None
    assert limited.max_model_len == 32


def refusal(given: EngineConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelPlan(given)
    return str(caught.value)


def test_models_that_cannot_draft_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    bert = tiny_bert(tmp_path / "bert")
    wide = tiny_llama(tmp_path / "wide", vocab_size=608)
    translate = model_folder("demo-translate")
    for given, said in (
        (config(checkpoint, wide), "has a vocabulary of 608 tokens, and the served model one of 6"),
        (config(checkpoint, bert), "BertModel is an encoder; a draft model must be a decoder"),
        (config(checkpoint, translate), "is an encoder-decoder; a draft model must be a decoder"),
        (config(bert, checkpoint), "BertModel is an encoder, and drafts need a decoder"),
        (config(translate, checkpoint), "is an encoder-decoder, and drafts need a decoder"),
        (config(checkpoint, tmp_path / "none"), "none: No model folder at"),
        (config(checkpoint, checkpoint, speculation="off"), "--speculation off forbids drafts"),
    ):
        refused = refusal(given)
        assert refused.startswith("--speculative-model ")
        assert said in refused


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    demo = model_folder("demo")
    other = shutil.copytree(demo, tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps(tokenizer, indent=1))
    assert ModelPlan(config(demo, other)).draft is not None, "only the text of the file differs"
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    assert "another tokenizer than the served model: the token" in refusal(config(demo, other))
    file.write_text("{")
    assert f"Cannot read {file}" in refusal(config(demo, other))
    os.truncate(file, 6 << 30)
    assert f"Cannot read {file}: it has {6 << 30} bytes; at most" in refusal(config(demo, other))
    file.unlink()
    assert ModelPlan(config(demo, other)).draft is not None, "the sizes are equal"


def test_name_of_a_model_is_that_of_the_hub_or_the_last_part_of_its_path() -> None:
    cache = "/cache/hub/models--org--small-1/snapshots/0123"
    assert model_name(cache) == model_name(f"{cache}/q8.gguf") == "org/small-1"
    assert model_name("/data/models/small/") == "small"
    assert model_name("/data/models/small.Q8_0.gguf") == "small.Q8_0"
    assert model_name("demo") == "demo"
