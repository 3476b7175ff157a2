"""The engine with the Triton backend, in Triton's interpreter, equals the torch backend.

The tests are small because the interpreter takes a hundred times as long. Many other tests of the
engine also run on this backend, marked slow (see `each` in driver.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_greedy import check, load
from tests.support.driver import Driver, tiny_llama
from tests.support.reference_data import LLAMA, located
from tests.support.tiny_bert import tiny_bert

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from tests.support.interpreter import launches, mend

pytestmark = pytest.mark.usefixtures("one_thread")
LATE = {"depth": 1, "late": True}
PROMPTS = [[7 * n + i for i in range(20 + n)] for n in range(3)]


def both(checkpoint: Path, **config: Any) -> list[Driver]:
    config = {"block_size": 16} | LATE | config
    return [Driver(checkpoint, attention_backend=name, **config) for name in ("torch", "triton")]


def answers(driver: Driver, tokens: int) -> list[list[int]]:
    ids = [driver.submit(prompt, tokens) for prompt in PROMPTS]
    driver.run()
    return [driver.tokens(i) for i in ids]


@pytest.mark.slow
def test_triton_engine_matches_reference() -> None:
    """Tokens and logprobs, with prompts of several lengths that are prefilled in chunks."""
    golden = load(located(LLAMA))
    driver = Driver(golden.folder, attention_backend="triton", max_num_batched_tokens=48, **LATE)
    assert driver.core.facts.attention_backend == "triton"
    check(golden, driver, [(0, 5), (60, 5), (20, 5)])


@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8"))]
)
def test_triton_engine_with_quantized_weights_equals_torch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernel, the rounded weights are multiplied in fp32: the numbers are the same."""
    mend()
    sizes = {"vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    model = tiny_llama(tmp_path / "model", **sizes)
    config = {"quantization": kind, "attention_backend": "torch", "block_size": 16} | LATE
    monkeypatch.setattr("tests.engine.test_triton.PROMPTS", [[5, 60, 7], [9] * 17])
    due = answers(Driver(model, **config), 3)
    monkeypatch.setattr("engine.memory.model_plan.select_kernels", lambda *_: "triton")
    found = Driver(model, **config)
    counted = launches(monkeypatch)
    assert answers(found, 3) == due
    assert counted["_codes_kernel"] > 0
    facts = found.core.facts
    assert facts.quantization == kind
    for entry in facts.memory:
        is_weights = "weights" in entry.name and not entry.name.startswith("attention")
        assert not is_weights or entry.planned == entry.measured


def test_triton_engine_after_preemption_equals_torch(checkpoint: Path) -> None:
    """Three sequences need three blocks each, and there are five."""
    due, found = both(checkpoint, num_gpu_blocks_override=5, max_model_len=64)
    assert answers(found, 14) == answers(due, 14)
    assert found.stats.preemptions == due.stats.preemptions > 0


@pytest.mark.slow
def test_triton_engine_prefix_hits_equal_torch(checkpoint: Path) -> None:
    due, found = both(checkpoint)
    cold = answers(found, 3)
    assert answers(found, 3) == cold == answers(due, 3)
    assert found.stats.prefix_hits == 3 * 16


@pytest.mark.slow
def test_triton_engine_after_abort_equals_torch(checkpoint: Path) -> None:
    """One of three requests is aborted during decode; the next request gets its blocks."""
    told = []
    for driver in both(checkpoint, num_gpu_blocks_override=9, max_model_len=48):
        ids = [driver.submit(prompt, 8) for prompt in PROMPTS]
        driver.turn(4)
        driver.abort(ids[1])
        ids.append(driver.submit(PROMPTS[1][5:], 8))
        driver.run()
        told.append([driver.tokens(i) for i in ids])
        assert len(driver.tokens(ids[1])) < 8
    assert told[0] == told[1]


def test_triton_engine_embeddings_are_close_to_torch(tmp_path: Path) -> None:
    """Embeddings from an encoder: several texts in one step, and one text alone."""
    due, found = both(tiny_bert(tmp_path / "tiny-bert"), depth=0, late=False)
    vectors = []
    for driver in (due, found):
        ids = [driver.embed(prompt) for prompt in PROMPTS]
        driver.run()
        vectors.append(torch.stack([driver.vector(i) for i in ids]))
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-5, atol=1e-5)
    alone = found.embed(PROMPTS[1])
    found.run()
    torch.testing.assert_close(found.vector(alone), vectors[1][1], rtol=1e-5, atol=1e-6)
