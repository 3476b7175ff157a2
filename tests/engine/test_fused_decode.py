"""The engine with fused decode attention, in Triton's interpreter, equals the torch backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.driver import Driver, tiny_llama
from tests.support.tiny_qwen3 import tiny_qwen3

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from engine.kernels.triton.chips import Features, force
from tests.support.interpreter import launches, mend

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PROMPTS = [[5, 60, 7], [9] * 17, [3 * i % 70 for i in range(30)]]
LATE = {"depth": 1, "late": True, "block_size": 16, "speculation": "off"}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Force the fused kernels, in Triton's interpreter."""
    mend()
    monkeypatch.setattr("engine.memory.model_plan.select_kernels", lambda *_: "triton")
    force(Features(fused_attention=True, longest_first=True, rotates_heads_together=True))
    yield
    force(None)


def both(folder: Path, **config: object) -> list[Driver]:
    """Return an engine on the torch backend and one with fused kernels."""
    config = LATE | config
    return [
        Driver(folder, attention_backend="torch", **config),
        Driver(folder, attention_backend="triton", **config),
    ]


def answers(driver: Driver, tokens: int, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    """Return greedy answers to prompts of different lengths, whose steps mix with one another."""
    ids = [driver.submit(prompt, tokens) for prompt in prompts]
    driver.run()
    return [driver.tokens(i) for i in ids]


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_fused_engine_ragged_contexts_and_prefix_hits_equal_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step has the decode kernel of other chips."""
    due, found = both(tiny_llama(tmp_path / "model", **SIZES), max_num_batched_tokens=24)
    counted = launches(monkeypatch)
    cold = answers(found, 4)
    assert cold == answers(due, 4)
    assert answers(found, 4) == cold
    assert found.stats.prefix_hits > 0
    assert counted["fused_decode_kernel"] > 0
    assert counted["decode_kernel"] == counted["reduce_kernel"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_fused_engine_after_preemption_equals_torch(tmp_path: Path) -> None:
    """Two sequences need three blocks each, and there are five."""
    small = {"num_gpu_blocks_override": 5, "max_model_len": 64}
    due, found = both(tiny_llama(tmp_path / "model", **SIZES), **small)
    prompts = [[7 * n + i for i in range(28 + n)] for n in range(2)]
    assert answers(found, 7, prompts) == answers(due, 7, prompts)
    assert found.stats.preemptions == due.stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_fused_engine_with_drafts_equals_torch(tmp_path: Path) -> None:
    """Answers repeat, so that tokens are drafted and several of a sequence are in one step."""
    due, found = both(tiny_llama(tmp_path / "model", **SIZES), speculation="ngram")
    assert answers(found, 16) == answers(due, 16)
    assert found.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_fused_engine_with_head_norms_equals_torch(tmp_path: Path) -> None:
    due, found = both(tiny_qwen3(tmp_path / "model"))
    assert answers(found, 3) == answers(due, 3)
