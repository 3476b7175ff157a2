"""DeepSeek-V3 against transformers: sigmoid scores, the bias for the choice, yarn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.models.deepseek_v3 import DeepseekV3
from tests.engine.models.test_deepseek_v2 import SIZES, YARN, published
from tests.support.drafts import draft_from
from tests.support.golden import (
    ANSWER,
    FEW,
    TOLERANCE,
    Case,
    Equality,
    Golden,
    full_prefill,
    golden_tests,
    last_logits,
    load,
)
from tests.support.quantized_files import FP8_BLOCKS, Floats, write_quantized

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**(SIZES | {"rope_parameters": YARN} | overrides))


def with_draft_layer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Spell the config as published, and add tensors of the layer for multi-token prediction."""
    published(config, tensors)
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    last = f"model.layers.{config['num_hidden_layers']}."
    names = ("self_attn.kv_b_proj.weight", "eh_proj.weight", "shared_head.norm.weight")
    tensors.update({last + name: torch.ones(3, 3) for name in names})


CASE = Case(
    "sigmoid",
    lambda: config(attention_bias=True),
    without={"norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_group": 4},
    zeroed=[
        "e_score_correction_bias",
        "shared_experts",
        "q_a_proj.bias",
        "kv_a_proj_with_mqa.bias",
        "o_proj.bias",
    ],
    replaced={"engine.models.deepseek_v2._yarn_scale": lambda scaling: 1.0},
)
HALVES = Case(
    "halves",
    lambda: config(rope_interleave=False, q_lora_rank=None, first_k_dense_replace=0),
    edit=with_draft_layer,
    without={"rope_interleave": True},
)


@golden_tests([CASE], quick=FEW)
def test_deepseek_v3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([HALVES], [full_prefill])
def test_deepseek_v3_published_files_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", [CASE], indirect=True)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_deepseek_v3_drafts_change_nothing(golden: Golden, share: float) -> None:
    """Whether all drafted tokens are right, or half of them are wrong."""
    driver = golden.driver(enable_prefix_caching=False)
    requests: dict[int, int] = {}
    draft_from(driver, lambda i: [token for token, _ in golden.alone[requests[i]]], share)
    for index in (1, 3):
        request = driver.submit(golden.prompts[index], ANSWER, logprobs=0)
        requests[request] = index
        driver.run()
        found = zip(driver.tokens(request), driver.logprobs(request), strict=True)
        assert list(found) == golden.alone[index]
    assert driver.stats.drafted_right > 0


@pytest.mark.parametrize("golden", [HALVES], indirect=True)
def test_deepseek_v3_fp8_blocks_give_the_numbers_of_their_definition(
    golden: Golden, tmp_path: Path
) -> None:
    """The tensors of the draft layer are quantised, too. The router is not."""
    form = Floats(FP8_BLOCKS | {"weight_block_size": [16, 16]}, 16, 16, "weight_scale_inv").format
    numbers = write_quantized(golden.folder, tmp_path / "fp8", form)
    plain = load_file(golden.folder / "model.safetensors")
    routers = [name for name in plain if name.endswith("mlp.gate.weight")]
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    for name in routers:
        del numbers[name], stored[f"{name}_scale_inv"]
    save_file(
        {
            name: each.contiguous()
            for name, each in (stored | {n: plain[n] for n in routers}).items()
        },
        tmp_path / "fp8" / "model.safetensors",
    )
    rounded = {name: torch.from_numpy(each) for name, each in numbers.items()}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_bytes((golden.folder / "config.json").read_bytes())
    save_file(plain | rounded, tmp_path / "plain" / "model.safetensors")
    found, due = (last_logits(golden, load(tmp_path / name)) for name in ("fp8", "plain"))
    torch.testing.assert_close(found, due, **TOLERANCE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"n_group": 8}, "n_group 8"),  # each has one expert, and two are needed
        ({"n_group": None}, "n_group"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_deepseek_v3_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        DeepseekV3.read_config(config().to_dict() | wrong)
