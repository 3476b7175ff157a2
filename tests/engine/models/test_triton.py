"""The Triton backend in Triton's interpreter, for every kind of attention in the models."""

from __future__ import annotations

import pytest

from tests.engine.models import (
    test_cohere2,
    test_deepseek_v2,
    test_embedding_gemma,
    test_gemma2,
    test_gemma3,
    test_gemma4,
    test_glm4,
    test_gpt2,
    test_llama,
    test_marian,
    test_ministral3,
    test_mistral,
    test_modernbert,
    test_mpnet,
    test_nanochat,
    test_nomic_bert,
    test_qwen3,
    test_qwen3_next,
    test_t5,
)
from tests.support.driver import Driver
from tests.support.encoders import Encoder, check_exact, hidden_states
from tests.support.golden import Case, Golden, load

pytest.importorskip("triton", reason="kernels need triton, which is not installed")
TOKENS = 3
# The one with the most features: grouped heads, softcap, window.
QUICK = [test_gemma2.CASE]
OTHERS = [
    test_cohere2.CASE,
    test_deepseek_v2.LITE,
    test_gemma3.CASE,
    test_glm4.CASE,
    test_gemma4.CASE,
    test_gemma4.E2B,
    test_gpt2.CASES[0],
    test_llama.CASES[0],
    test_mistral.WINDOWED,
    test_ministral3.CASE,
    test_nanochat.CASES[-1],
    test_qwen3.CASE,
    test_qwen3_next.CASE,
    test_t5.CASES[0],
    test_marian.MARIAN,
]


def answers(golden: Golden, driver: Driver, indices: list[int]) -> tuple[list[int], list[float]]:
    """Return the concatenated (tokens, logprobs) of these prompts, computed together."""
    ids = [
        driver.submit(golden.prompts[i], TOKENS, source=golden.sources[i], logprobs=0)
        for i in indices
    ]
    driver.run()
    tokens = [token for i in ids for token in driver.tokens(i)]
    return tokens, [logprob for i in ids for logprob in driver.logprobs(i)]


def check(golden: Golden) -> None:
    """Run a chunked prompt together with decodes, then the prompt again as a prefix hit."""
    driver = golden.driver(attention_backend="triton", max_num_batched_tokens=40)
    for indices in ([1, 4], [4]):
        tokens, logprobs = answers(golden, golden.driver(), indices)
        found, their_logprobs = answers(golden, driver, indices)
        assert found == tokens
        assert their_logprobs == pytest.approx(logprobs, abs=5e-4)
    assert driver.stats.prefix_hits > 0


def cases(*chosen: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("golden", chosen, ids=[c.name for c in chosen], indirect=True)


@cases(*QUICK)
def test_triton_backend_matches_torch(golden: Golden) -> None:
    check(golden)


@pytest.mark.slow
@cases(*OTHERS)
def test_triton_backend_further_models_match_torch(golden: Golden) -> None:
    check(golden)


# A relative bias; windows to both sides, with rotary positions; grouped heads; a norm at the end.
ENCODERS = [
    test_mpnet.CASE,
    test_modernbert.CASE,
    test_nomic_bert.CASE,
    test_embedding_gemma.CASE,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoder", ENCODERS, ids=["mpnet", "modernbert", "nomic_bert", "embedding_gemma"], indirect=True
)
def test_triton_backend_encoders_match_the_reference(encoder: Encoder) -> None:
    runner = load(encoder.folder, attention_backend="triton")
    for found, due in zip(hidden_states(runner, encoder.texts), encoder.expected, strict=True):
        check_exact(found, due)
