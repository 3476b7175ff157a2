"""Several ranks answer like one: with seeds, drafts, grammars, shared KV heads and codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.protocol.generate import Grammar
from engine.runner.load import load_engine
from tests.engine.test_seeds import SETTINGS, request
from tests.server.conftest import EOS, byte_tokenizer
from tests.support.driver import Driver, tiny_llama
from tests.support.ranks import ranked

SCHEMA = {"enum": ["the first answer", "the second answer", "another one"]}
TRANSLATOR = Path("demo-translate")
LINE = [5, 6, 7, 8, 9, 10, 11, 12]  # repeated, so that n-grams draft


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose vocabulary two ranks cannot divide evenly, and a tokenizer."""
    folder = tiny_llama(
        tmp_path_factory.mktemp("ranks") / "model",
        vocab_size=601,
        hidden_size=64,
        intermediate_size=128,
    )
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def submit_all(driver: Driver) -> list[int]:
    """Submit prompts with all kinds of sampling parameters, a grammar, and one with drafts."""
    ids = []
    for number in range(len(SETTINGS)):
        prompt, params = request(number)
        ids.append(driver.submit(prompt, 12, logprobs=1, prompt_logprobs=1, **params))
    driver.run()
    source = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
    grammar = Grammar(source, (EOS,), "response_format")
    for seed in range(2):
        constrained = {"temperature": 1.0, "seed": seed, "stop_token_ids": (EOS,)}
        ids.append(driver.submit([65, 66], 40, grammar=grammar, **constrained))
    for _ in range(2):  # the second one finds the first one's blocks
        ids.append(driver.submit(LINE * 4, 24))
        driver.run()
    return ids


def check(model: Path, place: Path, size: int, **config: Any) -> None:
    alone = Driver(model, block_size=16, **config)
    due = submit_all(alone)
    with ranked(model, place, size, block_size=16, **config) as driver:
        for found, expected in zip(submit_all(driver), due, strict=True):
            assert driver.tokens(found) == alone.tokens(expected)
            assert driver.logprobs(found) == pytest.approx(alone.logprobs(expected), abs=1e-3)
        assert driver.stats.drafted
        assert driver.stats.prefix_hits


def test_two_ranks_answer_like_one_in_every_kind_of_request(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path / "place", 2)


def test_four_ranks_with_two_kv_heads_answer_like_one(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path / "place", 4, attention_backend="torch")


def test_two_ranks_answer_like_one_with_rounded_weights(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path / "place", 2, quantization="int8")


def translate_all(driver: Driver) -> list[int]:
    """Submit sources, the last of them once more, each greedily and with a seed."""
    ids = []
    for source in ([5, 6, 7], list(range(40, 90)), list(range(40, 90))):
        ids.append(driver.submit([0], 20, source=source))
        ids.append(driver.submit([0], 20, source=source, temperature=1.0, seed=3))
        driver.run()
    return ids


@pytest.mark.slow
def test_two_ranks_translate_like_one_with_rounded_weights(tmp_path: Path) -> None:
    config: dict[str, Any] = {"block_size": 16, "quantization": "int8"}
    alone = Driver(TRANSLATOR, **config)
    due = translate_all(alone)
    with ranked(TRANSLATOR, tmp_path / "place", 2, **config) as driver:
        found = translate_all(driver)
        assert [driver.tokens(i) for i in found] == [alone.tokens(i) for i in due]
        assert driver.cached_tokens(found[-1]) == 50


def test_explanation_with_two_ranks_draws_the_same_tokens(model: Path, tmp_path: Path) -> None:
    with ranked(model, tmp_path / "place") as driver:
        params = {"temperature": 1.0, "seed": 3, "top_k": 20}
        answered = driver.submit([1, 2, 3], 12, **params)
        driver.run()
        explained = driver.explain([1, 2, 3], driver.tokens(answered), **params)
        driver.run()
        assert driver.drawn(explained) == driver.tokens(answered)


def test_each_rank_plans_its_share_of_the_memory(model: Path) -> None:
    check_plans(model, 5 * 64, max_loras=3)


def test_each_rank_plans_its_share_of_an_encoder_decoder() -> None:
    check_plans(TRANSLATOR, 17 * 128)


def check_plans(model: Path, shared: int, max_loras: int = 0) -> None:
    """Check the plans of two ranks. Each has all of `shared` parameters: those of norms."""
    fields = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "threads": 4,
        "max_loras": max_loras,
    }
    whole = ModelPlan(EngineConfig(**fields))
    config = EngineConfig(**fields, tensor_parallel_size=2)
    plans = [ModelPlan(config, rank) for rank in range(2)]
    assert sum(plan.rank_parameters for plan in plans) == whole.num_parameters + shared
    assert [plan.num_parameters for plan in plans] == [whole.num_parameters] * 2
    # Adapters' A of q, k, v, gate and up, and B of the other two layers, are whole in both ranks.
    repeated = 3 * 2 * 16 * 7 * 64 * 4  # slots, blocks, rank, matrices, width, bytes
    sizes = [plan.adapters.num_bytes for plan in (*plans, whole) if plan.adapters is not None]
    assert not sizes or sizes[0] + sizes[1] == sizes[2] + repeated
    assert bool(sizes) == bool(max_loras)
    for plan in plans:
        assert plan.block_bytes == whole.block_bytes // 2
        assert plan.threads == 2
        assert plan.of_rank(100) == 50


@pytest.mark.parametrize(
    ("overrides", "config", "reason"),
    [
        ({}, {"tensor_parallel_size": 3}, "blocks.0.attention.qkv has 4 heads .* 3 processes"),
        ({"intermediate_size": 66}, {"tensor_parallel_size": 4}, "mlp.up has 66 .* 4 processes"),
        ({}, {"tensor_parallel_size": 2, "quantization": "fp8"}, "no whole groups of 128"),
        ({"vocab_size": 5}, {"tensor_parallel_size": 4}, "embed has only 5 rows"),
        ({}, {"tensor_parallel_size": 2, "speculative_model": "demo"}, "--speculative-model"),
    ],
    ids=["heads", "intermediate", "groups", "vocabulary", "draft"],
)
def test_model_that_cannot_be_divided_is_refused(
    tmp_path: Path, overrides: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96} | overrides
    folder = tiny_llama(tmp_path / "model", **sizes)
    size = config["tensor_parallel_size"]
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} .*{reason}"):
        ModelPlan(EngineConfig(model=str(folder), device="cpu", **config))


def test_ranks_without_their_processes_are_refused(model: Path) -> None:
    config = EngineConfig(model=str(model), device="cpu", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="only with `penstock serve`"):
        load_engine(config)
