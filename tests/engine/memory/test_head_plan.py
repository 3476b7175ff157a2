"""Whether a prediction head drafts: by default, by --speculation mtp, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.device.facts import onednn_has_matmul
from engine.errors import ConfigError
from engine.memory import head_plan
from engine.memory.model_plan import ModelPlan
from engine.memory.report import KV_CACHE, WEIGHTS, plan_memory
from engine.runner.load import load_engine
from tests.engine.models import test_qwen3_5 as qwen3_5
from tests.engine.models import test_qwen3_5_moe as qwen3_5_moe
from tests.support.driver import tiny_llama
from tests.support.golden import Edit, Tensors, edit_checkpoint, of_transformers
from tests.support.prediction_heads import add_head

FAMILIES: dict[str, Any] = {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}


def checkpoint(folder: Path, *edits: Edit, family: str = "qwen3_5", **config: Any) -> Path:
    pytest.importorskip("transformers")
    of_transformers(FAMILIES[family].config(**config), folder)
    for edit in edits:
        edit_checkpoint(folder, edit)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("head"), add_head)


def config(model: Path, **fields: Any) -> EngineConfig:
    default = {"device": "cpu", "dtype": "float32", "threads": 1, "state_memory_bytes": 2**22}
    return EngineConfig(model=str(model), **(default | fields))


def plan(model: Path, **fields: Any) -> ModelPlan:
    return ModelPlan(config(model, **fields))


def named(config: dict[str, Any], tensors: Tensors) -> None:
    config["mtp_num_hidden_layers"] = 1


def without_join(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["mtp.fc.weight"]


def inside(config: dict[str, Any], tensors: Tensors) -> None:
    """Put the model into a multimodal one; its head stays at the top."""
    join = tensors["mtp.fc.weight"]
    qwen3_5.inside(config, tensors)
    tensors["mtp.fc.weight"] = join


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """As `inside`, with experts in two tensors."""
    join = tensors["mtp.fc.weight"]
    qwen3_5_moe.as_published(config, tensors)
    tensors["mtp.fc.weight"] = join


def deeper(config: dict[str, Any], tensors: Tensors) -> None:
    config["mtp_num_hidden_layers"] = 2


def embedding(config: dict[str, Any], tensors: Tensors) -> None:
    config["mtp_use_dedicated_embeddings"] = True


def refusal(model: Path, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(model, speculation="mtp", **fields)
    refused = str(caught.value)
    assert refused.startswith("--speculation mtp is not possible: ")
    return refused


# ---- the default -----------------------------------------------------------------------------


def test_head_drafts_by_default_where_a_token_is_cheap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model has few layers and a large vocabulary."""
    dear = plan(folder).prediction
    assert dear.module is None
    assert "would cost 50% of a step" in dear.unused
    monkeypatch.setattr(head_plan, "draft_cost", lambda *given: 0.25)
    assert plan(folder).prediction.module is not None
    monkeypatch.setattr(head_plan, "draft_cost", lambda *given: 0.26)
    assert plan(folder).prediction.module is None
    assert plan(folder, speculation="mtp").prediction.module is not None


def test_cost_counts_the_experts_of_one_token(tmp_path: Path) -> None:
    family = "qwen3_5_moe"
    few = plan(checkpoint(tmp_path / "few", add_head, family=family), speculation="mtp")
    many = checkpoint(tmp_path / "many", add_head, family=family, num_experts=12)
    more = plan(many, speculation="mtp")
    costs = [
        head_plan.draft_cost(each.module, each.prediction.module)
        for each in (few, more)
        if each.prediction.module is not None
    ]
    assert more.num_parameters > few.num_parameters
    # Only the rows of the routers are more.
    assert costs[0] == pytest.approx(costs[1], rel=0.01)


def test_cost_counts_no_tower_that_encodes_images(folder: Path, tmp_path: Path) -> None:
    seeing = plan(checkpoint(tmp_path / "seeing", add_head, inside), speculation="mtp")
    blind = plan(folder, speculation="mtp")
    assert seeing.num_parameters > 1.05 * blind.num_parameters
    costs = [
        head_plan.draft_cost(each.module, each.prediction.module)
        for each in (seeing, blind)
        if each.prediction.module is not None
    ]
    assert costs[0] == pytest.approx(costs[1], rel=0.005)


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_other_drafts_take_no_head(folder: Path, speculation: str) -> None:
    found = plan(folder, speculation=speculation)
    assert found.prediction == head_plan.HeadPlan()
    assert len(found.modules) == 1


def test_lost_head_is_named_and_the_model_served(tmp_path: Path) -> None:
    silent = checkpoint(tmp_path / "silent")
    assert plan(silent).prediction == head_plan.HeadPlan()
    lost = checkpoint(tmp_path / "lost", named)
    facts = load_engine(config(lost)).facts
    assert "lack mtp.fc.weight" in facts.head_unused
    assert not facts.drafts_by_head
    partly = checkpoint(tmp_path / "partly", add_head, without_join)
    assert "lack mtp.fc.weight" in plan(partly).prediction.unused


# ---- refusals --------------------------------------------------------------------------------


def test_heads_that_cannot_draft_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    llama = tiny_llama(tmp_path / "llama")
    assert "LlamaForCausalLM has no prediction head that is served" in refusal(llama)
    assert "lack mtp.fc.weight" in refusal(checkpoint(tmp_path / "lost"))
    assert "--speculative-model drafts already" in refusal(folder, speculative_model=str(llama))
    assert "needs one rank, not 2" in refusal(folder, tensor_parallel_size=2)
    for edit, said in (
        (deeper, "mtp_num_hidden_layers = 2; 1 is served"),
        (embedding, "mtp_use_dedicated_embeddings = True; false is served"),
    ):
        other = checkpoint(tmp_path / edit.__name__, add_head, edit)
        assert said in refusal(other)
        assert said in plan(other).prediction.unused


def test_several_ranks_do_without_the_head(folder: Path) -> None:
    found = plan(folder, tensor_parallel_size=2).prediction
    assert found.module is None
    assert "needs one rank" in found.unused


# ---- what it takes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_planned_bytes_are_those_that_are_measured(folder: Path, fields: dict[str, Any]) -> None:
    if "quantization" in fields and not onednn_has_matmul(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no kernel for int8 here")
    loaded = load_engine(config(folder, speculation="mtp", **fields))
    assert loaded.facts.drafts_by_head
    for entry in loaded.facts.memory:
        assert entry.measured in (None, entry.planned), entry.name
    alone = plan(folder, speculation="off", **fields)
    head = loaded.plan.prediction.module
    assert head is not None
    parameters = sum(each.numel() for each in alone.module.parameters())
    assert loaded.plan.num_parameters == parameters, "the head is no part of the model"
    assert loaded.plan.weight_bytes > alone.weight_bytes
    assert loaded.plan.block_bytes == 2 * alone.block_bytes, "one attending layer more"
    planned = plan_memory(loaded.plan).planned
    assert {WEIGHTS, KV_CACHE} <= planned.keys()


def fuse_experts(config: dict[str, Any], tensors: Tensors) -> None:
    """Put the experts of the head into two tensors."""
    prefix = "mtp.layers.0.mlp.experts."
    gate, up, down = (
        torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(6)])
        for part in ("gate", "up", "down")
    )
    tensors[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
    tensors[f"{prefix}down_proj"] = down


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_spellings_of_a_head_are_the_same_head(family: str, tmp_path: Path) -> None:
    """Also in a multimodal checkpoint. Some have the experts one by one, others all in one."""
    edits = {"qwen3_5": [inside], "qwen3_5_moe": [as_published, fuse_experts]}[family]
    folders = [
        checkpoint(tmp_path / "alone", add_head, family=family),
        checkpoint(tmp_path / "inside", add_head, *edits, family=family),
    ]
    heads = []
    for each in folders:
        loaded = load_engine(config(each, speculation="mtp", prepack=False))
        assert loaded.plan.prediction.module is not None
        heads.append(loaded.plan.prediction.module.state_dict())
    first, second = heads
    assert first.keys() == second.keys() >= {"join.weight", "norm.weight"}
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
