"""Architectures close to Llama from GGUF files against `transformers`: names, rows and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.engine.checkpoint.gguf.test_models import (
    HEADS,
    LLAMA3,
    SIZES,
    YARN,
    logits_of,
)
from tests.support.gguf_files import write_gguf
from tests.support.golden import TOLERANCE, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
EXPERTS = {"num_experts_per_tok": 2}


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SIZES, **HEADS, **EXPERTS, num_local_experts=4, sliding_window=None)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, **experts, head_dim=32)


def olmoe() -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(**SIZES, **HEADS, **EXPERTS, num_experts=4)


def smollm3(**more: Any) -> Any:
    from transformers import SmolLM3Config

    sizes = SIZES | {"num_hidden_layers": 5, "pad_token_id": 0}
    return SmolLM3Config(**sizes, **HEADS, **more)


def arcee(**more: Any) -> Any:
    from transformers import ArceeConfig

    return ArceeConfig(**SIZES, **HEADS, **more)


def seed_oss() -> Any:
    from transformers import SeedOssConfig

    return SeedOssConfig(**SIZES, **HEADS, head_dim=32, attention_bias=True)


def glm() -> Any:
    from transformers import GlmConfig

    return GlmConfig(**SIZES, **HEADS, head_dim=16, rms_norm_eps=1e-5, pad_token_id=0)


def phi3(**more: Any) -> Any:
    from transformers import Phi3Config

    sizes = SIZES | {"pad_token_id": 0, "original_max_position_embeddings": 64}
    return Phi3Config(**sizes, **HEADS, **more)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * number for number in range(6)],
    "long_factor": [1.5 + 0.4 * number for number in range(6)],
    "partial_rotary_factor": 0.75,
}


def gpt_neox(**more: Any) -> Any:
    from transformers import GPTNeoXConfig

    sizes = SIZES | {"num_attention_heads": 4, "max_position_embeddings": 256}
    return GPTNeoXConfig(**sizes, **more)


def gpt_oss(**more: Any) -> Any:
    from transformers import GptOssConfig

    sizes = SIZES | {"num_hidden_layers": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}
    return GptOssConfig(**sizes, **HEADS, **experts, head_dim=32, **more)


GPT_OSS_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "mixtral": ("llama", mixtral),
    "qwen3_moe": ("qwen3moe", qwen3_moe),
    "olmoe": ("olmoe", olmoe),
    "smollm3": ("smollm3", smollm3),
    "smollm3 untied": ("smollm3", lambda: smollm3(tie_word_embeddings=False)),
    "arcee": ("arcee", arcee),
    "arcee scaled": ("arcee", lambda: arcee(rope_parameters=LLAMA3)),
    "seed_oss": ("seed_oss", seed_oss),
    "glm": ("chatglm", glm),
    "phi3": ("phi3", phi3),
    "phi3 with a window": ("phi3", lambda: phi3(sliding_window=20)),
    "phi3 longrope": ("phi3", lambda: phi3(rope_parameters=LONGROPE)),
    "gpt_neox": ("gptneox", gpt_neox),
    "gpt_neox in turn": ("gptneox", lambda: gpt_neox(use_parallel_residual=False)),
    "gpt_oss": ("gpt-oss", lambda: gpt_oss(rope_parameters=DEFAULT)),
    "gpt_oss yarn": ("gpt-oss", lambda: gpt_oss(rope_parameters=GPT_OSS_YARN)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.variants(4)
def test_logits_equal_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    reference = of_transformers(config(), tmp_path / "checkpoint")
    prompt = torch.randint(288, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", architecture)
    found = logits_of(file, prompt)
    with torch.inference_mode():
        due = reference(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(found, due, **TOLERANCE)


def round_experts(model: Any) -> None:
    """Give the weights of experts [experts, in, out] numbers that MXFP4 stores exactly."""
    kind = gguf.GGMLQuantizationType.MXFP4
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = gguf.quants.quantize(parameter.detach().mT.contiguous().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, kind)).mT.contiguous()


def test_gpt_oss_as_it_is_published_equals_the_checkpoint(tmp_path: Path) -> None:
    """Experts are MXFP4. Other matrices are F32 here, so that no rounding hides an error."""
    config = gpt_oss(rope_parameters=GPT_OSS_YARN)
    reference = of_transformers(config, tmp_path / "checkpoint", prepare=round_experts)
    experts = {"_exps.weight": "MXFP4"}
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "gpt-oss", others=experts)
    stored = [tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors]
    assert stored.count("MXFP4") == 3 * config.num_hidden_layers
    prompt = torch.randint(288, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    found = logits_of(file, prompt)
    with torch.inference_mode():
        due = reference(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(found, due, **TOLERANCE)
