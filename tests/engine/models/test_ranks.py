"""Two ranks answer like one: for each way in which an architecture's layers are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.layers.linear import Linear
from tests.engine.models import (
    test_arcee,
    test_bert,
    test_cohere2,
    test_deepseek_v2,
    test_deepseek_v3,
    test_distilbert,
    test_embedding_gemma,
    test_exaone4,
    test_gemma2,
    test_gemma3,
    test_gemma4,
    test_glm4,
    test_gpt2,
    test_gpt_neox,
    test_gpt_oss,
    test_granite_hybrid,
    test_granite_moe,
    test_gte,
    test_jina_v3,
    test_lfm2,
    test_lfm2_moe,
    test_llama,
    test_marian,
    test_ministral3,
    test_mixtral,
    test_modernbert,
    test_mpnet,
    test_nanochat,
    test_nomic_bert,
    test_olmo2,
    test_olmo3,
    test_olmoe,
    test_phi3,
    test_qwen2_moe,
    test_qwen3,
    test_qwen3_5,
    test_qwen3_moe,
    test_qwen3_next,
    test_roberta,
    test_roformer,
    test_stablelm,
    test_starcoder2,
    test_t5,
)
from tests.support.driver import Driver
from tests.support.encoders import Encoder, EncoderCase
from tests.support.golden import Case, Golden, answers
from tests.support.ranks import ranked

pytestmark = pytest.mark.usefixtures("one_thread")
BIASES = {"attention_bias": True, "mlp_bias": True}
# These linear layers are not shared.
WHOLE = (
    *("router", "shared_gate", "smear_gate", "gate.enter", "gate.leave", "per_layer.project"),
    *("attention.kv_down", "attention.q.down"),
)
FAST = [
    Case("llama", lambda: test_llama.config(**BIASES)),
    Case("qwen3", test_qwen3.config),
    Case("gemma2", test_gemma2.config),
    Case("gpt2", test_gpt2.config),
    Case("t5", test_t5.config),
    test_marian.MARIAN,
    Case("olmo2", test_olmo2.config),
]
SLOW = [
    Case("qwen2-moe", test_qwen2_moe.config),
    Case("cohere2", test_cohere2.config),
    test_ministral3.CASE,
    Case("olmo3", test_olmo3.config),
    Case("gemma3", test_gemma3.config),
    Case("arcee", test_arcee.config),
    Case("olmoe", test_olmoe.config),
    Case("granite-moe", test_granite_moe.config),
    Case("starcoder2", test_starcoder2.config),
    Case("stablelm", test_stablelm.config),
    Case("exaone4", test_exaone4.config),
    Case("glm4", test_glm4.config),
    test_gemma4.CASE,
    test_gemma4.E2B,
    test_gemma4.MIXTURE,
    Case("gpt-neox", test_gpt_neox.config),
    Case("phi3", test_phi3.config),
    Case("qwen3-moe", test_qwen3_moe.config),
    Case("mixtral", test_mixtral.config),
    Case("qwen3-next", test_qwen3_next.config),
    Case("qwen3-5", test_qwen3_5.config),
    test_gpt_oss.CASE,
    test_deepseek_v2.LITE,
    test_deepseek_v3.CASE,
    # Ranks share a group of heads, or have groups of their own.
    test_granite_hybrid.EXPERTS,
    replace(test_granite_hybrid.CASE, name="granite-hybrid-dense"),
    replace(test_lfm2.CASE, name="lfm2"),
    test_lfm2_moe.CASE,
    test_nanochat.CASES[-1],
    replace(test_t5.CASES[-1], name="t5-v1.1"),
]
CASES = [pytest.param(case, id=case.name) for case in FAST] + [
    pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW
]
ENCODERS = [
    pytest.param(case, id=case.name)
    for case in (
        EncoderCase("bert", test_bert.config),
        EncoderCase("roformer", lambda: test_roformer.config(embedding_size=32)),
    )
] + [
    pytest.param(case, id=name, marks=pytest.mark.slow)
    for name, case in {
        "mpnet": test_mpnet.CASE,
        "modernbert": test_modernbert.CASE,
        "gte": test_gte.CASE,
        "nomic_bert": test_nomic_bert.CASE,
        "jina_v3": test_jina_v3.CASE,
        "distilbert": test_distilbert.CASE,
        "roberta": test_roberta.CASE,
        "embedding_gemma": test_embedding_gemma.CASE,
    }.items()
]


@pytest.mark.parametrize("golden", CASES, indirect=True)
@pytest.mark.variants(2)
def test_two_ranks_answer_like_one(golden: Golden, tmp_path: Path) -> None:
    """In chunks of few tokens, and with preemptions."""
    blocks = 8 * len(golden.runner.kv.groups)
    settings = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    with ranked(
        golden.folder, tmp_path / "ranks", num_gpu_blocks_override=blocks, **settings
    ) as driver:
        for name, layer in driver.runner.model.named_modules():
            if isinstance(layer, Linear):
                assert (layer.tensors.shard is None) == name.endswith(WHOLE), name
        found = answers(driver, golden.prompts, golden.sources)
        for answer, due in zip(found, golden.alone, strict=True):
            assert [token for token, _ in answer] == [token for token, _ in due]
            expected = pytest.approx([logprob for _, logprob in due], abs=1e-3)
            assert [logprob for _, logprob in answer] == expected
        assert driver.stats.preemptions


def vectors(driver: Driver, texts: Sequence[list[int]]) -> torch.Tensor:
    """Return the vectors [texts, hidden] of all texts."""
    ids = [driver.embed(text) for text in texts]
    driver.run()
    return torch.stack([driver.vector(request) for request in ids])


@pytest.mark.parametrize("encoder", ENCODERS, indirect=True)
def test_two_ranks_embed_like_one(encoder: Encoder, tmp_path: Path) -> None:
    """In steps of few texts."""
    alone = encoder.driver()
    with ranked(encoder.folder, tmp_path / "ranks", max_num_encoder_tokens=40) as driver:
        for name, layer in driver.runner.model.named_modules():
            if isinstance(layer, Linear):
                assert (layer.tensors.shard is None) == (name == "project"), name
        found, due = vectors(driver, encoder.texts), vectors(alone, encoder.texts)
        assert (found - due).norm() <= 1e-6 * due.norm()
