"""Every architecture computes the same on CUDA, on the CPU and in its reference, in fp32.

The tests compare kernel and reference, eager and replayed graph, synchronous and overlapped, single
and batch, cold and prefix hit, preempted and not. Tokens are equal; logprobs agree within fp32
rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.models import (
    test_deepseek_v2,
    test_gemma2,
    test_gemma3,
    test_gemma4,
    test_glm4,
    test_gpt2,
    test_gpt_neox,
    test_gpt_oss,
    test_granite_hybrid,
    test_lfm2,
    test_llama,
    test_mixtral,
    test_nanochat,
    test_phi3,
    test_qwen3,
    test_qwen3_next,
    test_smollm3,
    test_t5,
)
from tests.support.forward import chunked, forward, whole
from tests.support.golden import BLOCK, Answer, Golden, answers, load, rescored

pytestmark = pytest.mark.gpu
CASES = {
    "llama": test_llama.CASES[0],
    "qwen3": test_qwen3.CASE,
    "gemma2": test_gemma2.CASE,
    "gemma3": test_gemma3.CASE,
    "gemma4": test_gemma4.CASE,
    "glm4": test_glm4.CASE,
    "gpt2": test_gpt2.CASES[0],
    "gpt-neox": test_gpt_neox.CASE,
    "gpt-oss": test_gpt_oss.CASE,
    "mixtral": test_mixtral.CASE,
    "phi3": test_phi3.CASE,
    "smollm3": test_smollm3.CASE,
    "nanochat": test_nanochat.CASES[0],
    "t5": test_t5.CASES[0],
    # Latent attention, and layers with a state: a scan, a convolution, a delta rule.
    "deepseek-v2": test_deepseek_v2.LITE,
    "granite-hybrid": test_granite_hybrid.CASE,
    "lfm2": test_lfm2.CASE,
    "qwen3-next": test_qwen3_next.CASE,
}
# T5 does not scale its attention scores, so rounding matters: another summation order changes its
# logits by up to 2e-4 even on a CPU. A missing feature changes them by 0.1 or more.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
# Several engines share this process; by default the first would take the memory of the whole card.
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20}


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(CASES[request.param], tmp_path_factory.mktemp(request.param))


def check(found: list[Answer], due: list[Answer]) -> None:
    for one, other in zip(found, due, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-3)


@pytest.mark.parametrize("size", [None, 1, 7, BLOCK])
def test_logits_for_each_chunk_size_equal_golden(
    golden: Golden, cuda: str, size: int | None
) -> None:
    """Size None prefills the whole prompt at once; size 1 decodes it token by token."""
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
def test_answers_in_each_mode_equal_golden(
    golden: Golden, cuda: str, config: dict[str, Any]
) -> None:
    driver = golden.driver(device=cuda, **SMALL | config)
    check(answers(driver, golden.prompts, golden.sources), golden.alone)


@pytest.mark.parametrize("config", [{"enforce_eager": True}, {"depth": 1}], ids=["eager", "graphs"])
def test_prompt_logprobs_equal_golden(golden: Golden, cuda: str, config: dict[str, Any]) -> None:
    """A step with prompt logprobs runs eagerly; the steps before and after it are replayed."""
    driver = golden.driver(device=cuda, max_num_batched_tokens=64, **SMALL | config)
    check(rescored(driver, golden), golden.alone)
    check(answers(driver, golden.prompts, golden.sources), golden.alone)


def test_answers_after_prefix_hit_equal_golden(golden: Golden, cuda: str) -> None:
    driver = golden.driver(device=cuda, **SMALL, depth=1)
    for _ in range(2):
        check(answers(driver, golden.prompts, golden.sources), golden.alone)
    assert driver.stats.prefix_hits


def test_answers_after_preemption_equal_golden(golden: Golden, cuda: str) -> None:
    blocks = 8 * len(golden.runner.kv.groups)
    driver = golden.driver(
        device=cuda, **SMALL, depth=1, num_gpu_blocks_override=blocks, enable_prefix_caching=False
    )
    check(answers(driver, golden.prompts, golden.sources), golden.alone)
    assert driver.stats.preemptions


def test_answers_with_a_draft_model_equal_golden(golden: Golden, cuda: str) -> None:
    """The model drafts for itself, so that only rounding can make a draft wrong."""
    if golden.runner.kind != "decoder":
        pytest.skip("only decoders have draft models")
    if golden.runner.kv.states is not None:
        pytest.skip("a draft model must attend in all of its layers")
    draft = str(golden.folder)
    driver = golden.driver(device=cuda, **SMALL, depth=1, speculative_model=draft)
    for prompt, due in zip(golden.prompts, golden.alone, strict=True):
        check(answers(driver, [prompt], [None]), [due])
    assert driver.stats.drafted
    assert driver.stats.drafted_right > 0.9 * driver.stats.drafted


def test_same_seed_in_any_batch_and_mode_draws_same_tokens(golden: Golden, cuda: str) -> None:
    """The request runs alone and in a batch, replayed and eager."""
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
