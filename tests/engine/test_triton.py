"""The engine on the Triton backend, in Triton's interpreter: what it answers on the torch backend.

Small on purpose, for the interpreter takes a hundred times as long; much of the suite runs on it,
too, among the slow tests (see `each` in driver.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driver import Driver
from tests.engine.test_greedy import check, load
from tests.engine.tiny_bert import tiny_bert

pytest.importorskip("triton", reason="kernels need triton, which is not installed")
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


def test_goldens(assets: Path) -> None:
    """The reference's tokens and logprobs, from prompts of several lengths and chunks of them."""
    golden = load(assets / "checkpoints" / "stories260K-llama")
    driver = Driver(golden.folder, attention_backend="triton", max_num_batched_tokens=48, **LATE)
    assert driver.core.facts.attention_backend == "triton"
    check(golden, driver, [(0, 5), (60, 5), (20, 5)])


def test_preempted(checkpoint: Path) -> None:
    """Five blocks for three sequences that need three each."""
    due, found = both(checkpoint, num_gpu_blocks_override=5, max_model_len=64)
    assert answers(found, 14) == answers(due, 14)
    assert found.stats.preemptions == due.stats.preemptions > 0


def test_prefix_hits(checkpoint: Path) -> None:
    due, found = both(checkpoint)
    cold = answers(found, 3)
    assert answers(found, 3) == cold == answers(due, 3)
    assert found.stats.prefix_hits == 3 * 16


def test_aborts(checkpoint: Path) -> None:
    """One of three leaves in the middle; its blocks go to whoever comes next."""
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


def test_texts(tmp_path: Path) -> None:
    """Vectors of an encoder, several texts at once and one alone."""
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
