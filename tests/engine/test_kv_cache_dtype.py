"""Engines with a KV cache of 8 bits: answers do not depend on the batch, chunks or the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, KVCacheDtype
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.runner.load import load_engine
from tests.engine.test_quantized import SMALL, answers, prompts
from tests.support.driver import Driver, tiny_llama
from tests.support.tiny_bert import tiny_bert

KINDS: list[KVCacheDtype] = ["int8", "fp8"]
kinds = pytest.mark.parametrize("kind", KINDS)
MODES: dict[str, dict[str, Any]] = {
    "torch": {"attention_backend": "torch"},
    "numba": {"attention_backend": "numba", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "model"
    return tiny_llama(folder, hidden_size=64, intermediate_size=96)


@kinds
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.variants(1)
def test_answers_are_equal_alone_together_chunked_and_preempted(
    model: Path, mode: dict[str, Any], kind: KVCacheDtype
) -> None:
    fields = {"kv_cache_dtype": kind, "block_size": 16, **mode}
    alone = answers(Driver(model, enable_prefix_caching=False, **fields), together=False)
    assert len({token for answer in alone for token in answer}) > 50
    plain = answers(Driver(model, **mode), together=False)
    assert alone != plain, "keys and values are rounded"
    roomy = Driver(model, **fields)
    assert answers(roomy, together=True) == alone
    assert answers(roomy, together=True) == alone, "with prefix hits"
    assert roomy.stats.prefix_hits > 0
    small = Driver(model, max_num_seqs=8, **SMALL, **fields)
    assert answers(small, together=True) == alone
    assert small.stats.preemptions > 0


@kinds
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_answers_of_triton_are_those_of_torch(model: Path, kind: KVCacheDtype) -> None:
    fields = {"kv_cache_dtype": kind, "max_num_batched_tokens": 24}
    found = []
    for backend in ("torch", "triton"):
        driver = Driver(model, attention_backend=backend, **fields)
        ids = [driver.submit(prompt, 6) for prompt in prompts()[:4]]
        driver.run()
        found.append([driver.tokens(number) for number in ids])
    assert found[0] == found[1]


@kinds
def test_captured_steps_have_answers_of_torch(model: Path, kind: KVCacheDtype) -> None:
    """A replayed step reads and writes scales that live as long as the engine."""
    fields = {"kv_cache_dtype": kind, "attention_backend": "torch"}
    captured = Driver(model, depth=1, captured=True, **fields)
    found = []
    for driver in (captured, Driver(model, **fields)):
        ids = [driver.submit(prompt, 8) for prompt in prompts()[:4]]
        driver.run()
        found.append([driver.tokens(number) for number in ids])
    assert found[0] == found[1]
    captured.check_static()


@kinds
def test_prompt_logprobs_are_those_of_generation(model: Path, kind: KVCacheDtype) -> None:
    """Chunks of a prompt see the rounded keys of their own tokens, as decodes do."""
    driver = Driver(model, kv_cache_dtype=kind, enable_prefix_caching=False)
    prompt = prompts()[0]
    first = driver.submit(prompt, 12, logprobs=0)
    driver.run()
    whole = [*prompt, *driver.tokens(first)]
    second = driver.submit(whole, 1, prompt_logprobs=0)
    driver.run()
    entries = driver.outputs[second][0].prompt_logprobs[-12:]
    assert [entry.logprob for entry in entries] == driver.logprobs(first)


@kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_those_that_are_measured(
    model: Path, kind: KVCacheDtype, dtype: Any
) -> None:
    config = EngineConfig(
        model=str(model), kv_cache_dtype=kind, device="cpu", dtype=dtype, threads=1
    )
    loaded = load_engine(config)
    entry = next(entry for entry in loaded.facts.memory if entry.name == "KV cache")
    assert entry.planned == entry.measured == loaded.facts.kv_cache_bytes
    assert loaded.facts.kv_cache_dtype == kind
    assert loaded.runner.kv.layers[0].keys.dtype in (torch.int8, torch.float8_e4m3fn)
    assert loaded.runner.kv.layers[0].key_scales is not None


@kinds
def test_same_bytes_hold_nearly_twice_the_blocks(tmp_path: Path, kind: KVCacheDtype) -> None:
    folder = tiny_llama(tmp_path / "wide", hidden_size=512, num_attention_heads=4)
    fields = {"model": str(folder), "device": "cpu", "dtype": "bfloat16", "block_size": 16}
    plain = ModelPlan(EngineConfig(kv_cache_memory_bytes=1 << 26, **fields))
    coded = ModelPlan(EngineConfig(kv_cache_memory_bytes=1 << 26, kv_cache_dtype=kind, **fields))
    blocks, coded_blocks = plain.plan_blocks(1 << 34)[0], coded.plan_blocks(1 << 34)[0]
    assert coded_blocks == int(blocks * 256 / (128 + 4))


@kinds
def test_encoder_without_kv_cache_is_refused(tmp_path: Path, kind: KVCacheDtype) -> None:
    folder = tiny_bert(tmp_path / "bert")
    config = EngineConfig(model=str(folder), kv_cache_dtype=kind, device="cpu")
    with pytest.raises(ConfigError, match=rf"--kv-cache-dtype {kind} .* no KV cache"):
        ModelPlan(config)


@kinds
def test_translation_does_not_depend_on_batch(kind: KVCacheDtype) -> None:
    """Layers that attend to a source read codes, too."""
    driver = Driver(Path("demo-translate"), kv_cache_dtype=kind)
    sources = [[5, 9, 12, 3], [7] * 9, list(range(4, 20))]
    found = []
    for together in (True, False):
        ids = []
        for source in sources:
            ids.append(driver.submit([1], 8, source=source))
            if not together:
                driver.run()
        driver.run()
        found.append([driver.tokens(number) for number in ids])
    assert found[0] == found[1]
    assert len({tuple(answer) for answer in found[0]}) > 1
