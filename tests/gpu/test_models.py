"""Every architecture on CUDA is what it is on the CPU and in its reference, in fp32.

kernel = reference, eager = replayed graph, synchronous = overlapped, alone = batch, cold = prefix
hit, preempted or not: tokens are equal and logprobs within the rounding of fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import (
    test_gemma2,
    test_gemma3,
    test_gpt2,
    test_llama,
    test_nanochat,
    test_qwen3,
    test_t5,
)
from tests.models.forward import chunked, forward, whole
from tests.models.golden import BLOCK, Answer, Golden, answers, load, rescored

pytestmark = pytest.mark.gpu
CASES = {
    "llama": test_llama.CASES[0],
    "qwen3": test_qwen3.CASE,
    "gemma2": test_gemma2.CASE,
    "gemma3": test_gemma3.CASE,
    "gpt2": test_gpt2.CASES[0],
    "nanochat": test_nanochat.CASES[0],
    "t5": test_t5.CASES[0],
}
# T5 does not scale its scores, so every rounding counts: sums in another order change its logits by
# up to 2e-4 on a CPU already. What a feature is about changes them by 0.1 and more.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
# Engines of one process live side by side: by default the first would take the whole card.
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20}


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(CASES[request.param], tmp_path_factory.mktemp(request.param))


def check(found: list[Answer], due: list[Answer]) -> None:
    for one, other in zip(found, due, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-3)


@pytest.mark.parametrize("size", [None, 1, 7, BLOCK])
def test_logits(golden: Golden, cuda: str, size: int | None) -> None:
    """None is the whole prompt at once, 1 decodes it token by token."""
    runner = load(golden.folder, device=cuda, **SMALL)
    assert runner.backend.name == "triton" or cuda == "cpu"
    prompts, sources = golden.prompts[-1:], golden.sources[-1:]
    plan = whole(prompts) if size is None else chunked(prompts, size)
    (logits,) = forward(runner, prompts, plan, sources)
    torch.testing.assert_close(logits.cpu(), golden.logits, **TOLERANCE)


@pytest.mark.parametrize(
    "config",
    [
        {"enforce_eager": True},
        {"enforce_eager": True, "depth": 1},
        {},
        {"depth": 1},
        {"depth": 1, "max_num_batched_tokens": 16},
    ],
    ids=["eager", "eager-overlapped", "graphs", "graphs-overlapped", "chunks"],
)
def test_answers(golden: Golden, cuda: str, config: dict[str, Any]) -> None:
    driver = golden.driver(device=cuda, **SMALL | config)
    check(answers(driver, golden.prompts, golden.sources), golden.alone)


@pytest.mark.parametrize("config", [{"enforce_eager": True}, {"depth": 1}], ids=["eager", "graphs"])
def test_scores(golden: Golden, cuda: str, config: dict[str, Any]) -> None:
    """A step that scores is not replayed; those before and after it are."""
    driver = golden.driver(device=cuda, max_num_batched_tokens=64, **SMALL | config)
    check(rescored(driver, golden), golden.alone)
    check(answers(driver, golden.prompts, golden.sources), golden.alone)


def test_prefix_hit(golden: Golden, cuda: str) -> None:
    driver = golden.driver(device=cuda, **SMALL, depth=1)
    for _ in range(2):
        check(answers(driver, golden.prompts, golden.sources), golden.alone)
    assert driver.stats.prefix_hits


def test_preempted(golden: Golden, cuda: str) -> None:
    blocks = 12 * len(golden.runner.kv.groups)
    driver = golden.driver(
        device=cuda, **SMALL, depth=1, num_gpu_blocks_override=blocks, enable_prefix_caching=False
    )
    check(answers(driver, golden.prompts, golden.sources), golden.alone)
    assert driver.stats.preemptions


def test_same_seed_same_tokens(golden: Golden, cuda: str) -> None:
    """Sampled alone and beside others; replayed and eager."""
    prompt, source = golden.prompts[-1], golden.sources[-1]
    params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 7}
    seen = []
    for config in ({"enforce_eager": True}, {}):
        driver = golden.driver(device=cuda, **SMALL, depth=1, **config)
        for others in (0, 3):
            ids = [driver.submit(prompt, 20, source=source, **params)]
            ids += [
                driver.submit(p, 20, source=s, temperature=1.0, seed=n)
                for n, (p, s) in enumerate(zip(golden.prompts, golden.sources, strict=True))
                if n < others
            ]
            driver.run()
            seen.append(driver.tokens(ids[0]))
    assert seen[1:] == seen[:-1]


def test_bf16_kernels_round_no_more_than_torch(golden: Golden, cuda: str) -> None:
    prompts, sources = golden.prompts[-1:], golden.sources[-1:]
    off = {}
    for backend in ("triton", "torch"):
        config = SMALL | {"dtype": "bfloat16", "attention_backend": backend}
        runner = load(golden.folder, device=cuda, **config)
        (logits,) = forward(runner, prompts, whole(prompts), sources)
        off[backend] = float((logits.cpu() - golden.logits).norm() / golden.logits.norm())
    assert off["triton"] < 1.5 * off["torch"] + 0.01, off
