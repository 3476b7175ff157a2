"""The plan of the memory that images take."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from engine.client.admission import MAX_PIXEL_BYTES
from engine.config import EngineConfig
from engine.memory import image_plan
from engine.memory.image_plan import (
    MOST_READ,
    MOST_WAITING,
    embedding_bytes,
    encoder_bytes,
    pixel_bytes,
)
from engine.memory.model_plan import ModelPlan
from engine.memory.report import IMAGES, LARGEST_STEP, PIXELS, planned_bytes
from engine.offline.plan import main
from server.images import pool
from tests.engine.models.test_gemma4_images import config, reference
from tests.support.driver import tiny_llama
from tests.support.gemma4_images import PROCESSOR
from tests.support.tiny_smolvlm import write_seeing

CONTEXT = 1024 * 64 * 4  # bytes: tokens, hidden size, fp32


def plan_of(folder: Path, max_num_seqs: int = 3) -> ModelPlan:
    config = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 16}
    return ModelPlan(EngineConfig(model=str(folder), max_num_seqs=max_num_seqs, **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ModelPlan:
    return plan_of(write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm"))


def test_embeddings_have_room_for_what_all_sequences_show(plan: ModelPlan) -> None:
    assert embedding_bytes(plan, 1024) == 3 * CONTEXT


def test_embeddings_are_bounded_but_hold_one_context(
    plan: ModelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_plan, "EMBEDDING_BYTES", 2 * CONTEXT)
    assert embedding_bytes(plan, 1024) == 2 * CONTEXT
    monkeypatch.setattr(image_plan, "EMBEDDING_BYTES", 5)
    assert embedding_bytes(plan, 1024) == CONTEXT


def test_table_has_the_images_of_a_model_that_sees_only(plan: ModelPlan, tmp_path: Path) -> None:
    seeing = planned_bytes(plan, 8, 1024)
    assert seeing[IMAGES] == embedding_bytes(plan, 1024)
    assert seeing[PIXELS] == pixel_bytes(plan, 1024) > 0
    blind = plan_of(tiny_llama(tmp_path / "llama"))
    assert not {IMAGES, PIXELS} & planned_bytes(blind, 8, 256).keys()
    assert encoder_bytes(blind) == 0


def test_plan_says_how_many_pixels_open_requests_may_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (MOST_READ, MOST_WAITING) == (pool.MAX_OPEN_BYTES, MAX_PIXEL_BYTES)
    folders = write_seeing(tmp_path / "smolvlm"), tiny_llama(tmp_path / "llama")
    said = []
    for folder in folders:
        config = EngineConfig(model=str(folder), device="cpu", kv_cache_memory_bytes=1 << 20)
        monkeypatch.setattr("sys.argv", ["plan", msgspec.json.encode(config).decode()])
        assert main() == 0
        said.append("pixels of all open requests: up to 1.1 GB" in capsys.readouterr().out)
    assert said == [True, False]


def test_largest_step_includes_a_unit_of_encoding(plan: ModelPlan) -> None:
    """A layer reads 1024 rows of 32 numbers, and writes 96 for queries, keys and values."""
    assert encoder_bytes(plan) >= 1024 * (32 + 96) * torch.float32.itemsize
    assert planned_bytes(plan, 8, 1024)[LARGEST_STEP] >= encoder_bytes(plan)


def test_unit_of_gemma_4_has_the_patches_of_an_image(tmp_path: Path) -> None:
    reference(config({"position_embedding_size": 3360}), tmp_path)
    found = []
    for budget in (12, 1120):
        processor = PROCESSOR | {"max_soft_tokens": budget}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
        found.append(encoder_bytes(plan_of(tmp_path)))
    assert found[1] * 1024 == found[0] * 1120 * 9, "a smaller image is planned as others are"
