"""DeepSeek-V3 against transformers: sigmoid scores, the bias for the choice, yarn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.memory.report import weights_bytes
from engine.models.deepseek_v3 import DeepseekV3
from tests.engine.models.test_deepseek_v2 import SIZES, YARN, published
from tests.support.adapters import folded, random_adapter
from tests.support.drafts import draft_from
from tests.support.driver import Driver
from tests.support.golden import (
    ANSWER,
    TOLERANCE,
    Case,
    Equality,
    Golden,
    accounts_for_tensors,
    answers,
    chunked_prefill,
    full_prefill,
    golden_tests,
    greedy,
    last_logits,
    load,
    of_transformers,
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


@golden_tests([CASE], quick=[full_prefill, chunked_prefill, greedy, accounts_for_tensors])
def test_deepseek_v3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([HALVES], [full_prefill])
def test_deepseek_v3_published_files_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", [CASE], indirect=True)
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose layers have whole groups of codes."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("wide") / "model"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "q_lora_rank": 32, "v_head_dim": 16}
    of_transformers(config(**sizes), folder)
    return folder


@pytest.mark.parametrize("kind", [pytest.param(None, marks=pytest.mark.slow), "int8"])
def test_deepseek_v3_takes_the_planned_bytes_and_answers_together_as_alone(
    wide: Path, kind: str | None
) -> None:
    """The parts of heads stay plain, and the router keeps fp32, in a model of bfloat16."""
    driver = Driver(wide, dtype="bfloat16", quantization=kind, block_size=16)
    plan = driver.loaded.plan
    assert (plan.backend.name, plan.kernels) == ("numba", "numba")
    assert weights_bytes(plan.module) == plan.plain_bytes + plan.packed_bytes
    block = plan.module.blocks[1]
    assert block.mlp.router.tensors.packed_bytes == 8 * 64 * 4
    assert block.attention.kv_up.tensors.packed_bytes == 4 * (16 + 16) * 32 * 2
    prompts = [list(range(3, 3 + count)) for count in (1, 18, 40)]
    alone = [answers(driver, [prompt], [[]])[0] for prompt in prompts]
    assert answers(driver, prompts, [[]] * 3) == alone


@pytest.mark.slow
@pytest.mark.parametrize("golden", [CASE], indirect=True)
def test_deepseek_v3_keys_of_8_bits_change_little_and_keep_equalities(golden: Golden) -> None:
    drivers = [golden.driver(kv_cache_dtype="int8", max_num_batched_tokens=m) for m in (512, 32)]
    found, in_chunks = (answers(driver, golden.prompts, golden.sources) for driver in drivers)
    assert found == in_chunks
    assert found != golden.alone, "keys are rounded"
    firsts = [(one[0], due[0]) for one, due in zip(found, golden.alone, strict=True)]
    assert max(abs(one[1] - due[1]) for one, due in firsts if one[0] == due[0]) < 0.2
    assert sum(one[0] == due[0] for one, due in firsts) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("golden", [CASE], indirect=True)
def test_deepseek_v3_adapters_of_projections_are_applied(golden: Golden, tmp_path: Path) -> None:
    modules = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    adapter = random_adapter(tmp_path / "adapter", golden.folder, modules=modules)
    merged = folded(golden.folder, adapter, tmp_path / "merged")
    driver = golden.driver(lora_modules=(f"a={adapter}",))
    request = driver.submit(golden.prompts[2], 8, adapter=1, logprobs=0)
    driver.run()
    due = Driver(merged, block_size=16)
    expected = due.submit(golden.prompts[2], 8, logprobs=0)
    due.run()
    assert driver.tokens(request) == due.tokens(expected)
    assert driver.logprobs(request) == pytest.approx(due.logprobs(expected), abs=2e-3)


@pytest.mark.parametrize("golden", [CASE], indirect=True)
@pytest.mark.parametrize("module", ["kv_b_proj", "mlp.gate"])
def test_deepseek_v3_adapters_of_other_layers_are_refused_by_name(
    golden: Golden, module: str, tmp_path: Path
) -> None:
    adapter = random_adapter(tmp_path / "adapter", golden.folder, modules=(module,))
    with pytest.raises(ConfigError, match=f"{module}, which is no linear layer of this model"):
        golden.driver(lora_modules=(f"a={adapter}",))


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
