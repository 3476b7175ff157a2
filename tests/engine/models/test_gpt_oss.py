"""gpt-oss against transformers: sinks, biases of experts, the clamped activation, mxfp4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.quantized.small_floats import DOUBLED
from engine.errors import ConfigError
from engine.kernels.numba.codes import has_instructions
from engine.models.gpt_oss import GptOss
from tests.support.driver import Driver
from tests.support.forward import forward, whole
from tests.support.golden import (
    EQUALITIES,
    TOLERANCE,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    golden_tests,
    load,
    of_transformers,
    refusal,
    window_is_exact,
)
from tests.support.ranks import ranked

pytestmark = pytest.mark.usefixtures("one_thread")
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


def config(**overrides: Any) -> Any:
    from transformers import GptOssConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.5,
        "rope_parameters": ROPE,
    }
    return GptOssConfig(**(small | overrides))


CASE = Case(
    "experts",
    config,
    without={
        "layer_types": ["full_attention"] * 2,
        "swiglu_limit": 100.0,
        "swiglu_alpha": 0.1,
    },
    zeroed=["gate_up_proj_bias", "down_proj_bias", "router.bias", "sinks", "o_proj.bias"],
    lengths=WINDOW_LENGTHS,
)


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_gpt_oss_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


# ---- mxfp4 -----------------------------------------------------------------------------------


def pack_mxfp4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round [experts, in, out] to mxfp4: its blocks, its scales, and the rounded numbers."""
    groups = tensor.mT.unflatten(-1, (-1, 32))  # [experts, out, groups, 32]
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))).int() - 2
    table = torch.tensor([*DOUBLED, *(-number for number in DOUBLED)]) / 2
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = (scaled[..., None] - table).abs().argmin(-1).to(torch.uint8)
    numbers = torch.ldexp(table[codes.int()], exponents[..., None]).flatten(-2).mT
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8), numbers


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder with mxfp4 weights, and one with the same numbers in fp32."""
    pytest.importorskip("transformers")
    plain = tmp_path_factory.mktemp("gpt-oss") / "plain"
    of_transformers(config(), plain)
    folder = plain.with_name("mxfp4")
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        blocks, scales, numbers = pack_mxfp4(stored.pop(name))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = numbers.contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(
        {name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors"
    )
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, plain


def test_mxfp4_gives_the_numbers_of_its_definition(quantized: tuple[Path, Path]) -> None:
    folder, plain = quantized
    prompt = torch.randint(211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    found, due = (_logits(load(each), prompt) for each in (folder, plain))
    torch.testing.assert_close(found, due, **TOLERANCE)


def _logits(runner: Any, prompt: list[int]) -> torch.Tensor:
    return forward(runner, [prompt], whole([prompt]))[0]


@pytest.mark.skipif(not has_instructions(), reason="this CPU has no kernel for codes")
def test_mxfp4_codes_are_kept(quantized: tuple[Path, Path]) -> None:
    folder, plain = quantized
    prompt = torch.randint(211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    shared: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "numba"}
    kept, rounded = Driver(folder, **shared), Driver(plain, **shared)
    assert kept.loaded.facts.quantization == "mxfp4"
    exact = _logits(load(plain), prompt)
    errors = [
        float((_logits(driver.runner, prompt) - exact).norm() / exact.norm())
        for driver in (kept, rounded)
    ]
    assert errors[0] < 2.5 * errors[1] < 0.2


@pytest.mark.skipif(not has_instructions(), reason="this CPU has no kernel for codes")
def test_mxfp4_codes_are_divided(quantized: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = quantized
    prompt = torch.randint(211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    shared: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "numba"}

    def first(driver: Driver) -> tuple[list[int], list[float]]:
        request_id = driver.submit(prompt, 1, logprobs=0)
        driver.run()
        return driver.tokens(request_id), driver.logprobs(request_id)

    tokens, logprobs = first(Driver(folder, **shared))
    with ranked(folder, tmp_path / "place", **shared) as driver:
        assert driver.loaded.facts.quantization == "mxfp4"
        assert first(driver) == (tokens, pytest.approx(logprobs, abs=0.05))


# ---- refusals --------------------------------------------------------------------------------


def test_a_wrong_number_of_experts_is_refused(goldens: Any) -> None:
    def edit(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        settings["num_local_experts"] = 4

    assert "config.json asks for" in refusal(goldens(CASE), edit)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"swiglu_limit": 0}, "swiglu_limit = 0"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6, but only 5 experts"),
        ({"num_local_experts": None}, "lacks 'num_local_experts'"),
    ],
    ids=["limit", "too many", "missing"],
)
def test_gpt_oss_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        GptOss.read_config(config().to_dict() | wrong)
