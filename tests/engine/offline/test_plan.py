"""`--plan` for one process and for several, on a CPU and on GPUs without memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from engine.config import EngineConfig
from engine.device.ranks import Ranks
from engine.kernels.triton.chips import Features, force
from engine.kernels.triton.rank_sum import BLOCK_BYTES, buffer_bytes
from engine.memory.model_plan import ModelPlan
from engine.memory.rank_plan import NCCL_BYTES, sum_bytes
from engine.memory.report import KV_CACHE, NCCL, RANK_SUMS, plan_memory, planned_bytes
from engine.offline import plan
from tests.support.driver import tiny_llama
from tests.support.fake_cuda import fake_cuda


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", hidden_size=96, num_hidden_layers=1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPUs whose ranks add small tensors in one launch."""

    def device_of_rank(device: torch.device, ranks: Ranks) -> torch.device:
        return torch.device("cuda", ranks.own) if device.type == "cuda" else device

    monkeypatch.setattr("engine.memory.model_plan.device_of_rank", device_of_rank)
    force(Features(rank_sums=True))
    with fake_cuda():
        yield
    force(None)


def config(model: Path, ranks: int, device: str) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        load_format="dummy",
        dtype="bfloat16",
        device=device,
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=1 << 20,
    )


def printed(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *more: str,
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["plan", msgspec.json.encode(config).decode(), *more])
    assert plan.main() == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_bytes_are_those_of_the_table_and_follow_the_given_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(model, 1, "cpu")
    lines = printed(given, monkeypatch, capsys)
    [in_all] = [line for line in lines if line.endswith(" in all")]
    [text] = printed(given, monkeypatch, capsys, "bytes", "0")
    total, kv_cache, capacity = msgspec.json.decode(text)
    assert f"{total:,}" == in_all.split()[0]
    assert kv_cache <= 1 << 20
    assert capacity is None
    free = msgspec.structs.replace(given, kv_cache_memory_bytes=None)
    sizes = []
    for available in (2 << 30, 3 << 30):
        [text] = printed(free, monkeypatch, capsys, "bytes", str(available))
        sizes.append(msgspec.json.decode(text))
    assert sizes[1][1] >= sizes[0][1] > 0
    assert sizes[1][0] - sizes[0][0] == sizes[1][1] - sizes[0][1]


def test_plan_of_one_process_has_exact_bytes(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *lines = printed(config(model, 1, "cpu"), monkeypatch, capsys)
    assert first.endswith("bfloat16 on cpu; bytes:")
    [total] = [line for line in lines if line.endswith(" in all")]
    assert int(total.split()[0].replace(",", "")) > 320_000_000
    assert not any(NCCL in line or "rank 0" in line for line in lines)


def test_plan_of_several_gpus_has_a_column_for_each(
    model: Path,
    gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, header, *lines = printed(config(model, 2, "cuda"), monkeypatch, capsys)
    assert first.endswith("bfloat16 on cuda; bytes of each of 2 ranks:")
    assert header == "rank 0, cuda:0 rank 1, cuda:1"
    assert f"536.9 MB 536.9 MB {NCCL}" in lines
    assert sum(line.endswith(RANK_SUMS) for line in lines) == 1
    [total] = [line for line in lines if line.endswith(" in all")]
    assert len(total.split()) == 6


def test_ranks_with_unequal_room_have_equal_caches(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, rank 0 has the grammars' processes, so the others have more room."""
    unlimited = msgspec.structs.replace(config(model, 2, "cpu"), kv_cache_memory_bytes=None)
    plans = [ModelPlan(unlimited, rank) for rank in range(2)]
    fixed = sum(planned_bytes(plans[0], 0, plans[0].max_model_len).values())
    available = 2 * (fixed + (4 << 20))
    monkeypatch.setattr("engine.memory.report.available_memory", lambda device: available)
    rooms = [plan_memory(each).num_blocks for each in plans]
    assert rooms[0] < rooms[1]
    ranks = plan._with_equal_caches(plans)
    assert [memory.num_blocks for _, memory in ranks] == [rooms[0]] * 2
    assert ranks[0].memory.planned[KV_CACHE] == ranks[1].memory.planned[KV_CACHE]


def test_buffers_between_gpus_are_part_of_the_plan(model: Path, gpus: None) -> None:
    plan = ModelPlan(config(model, 4, "cuda"), rank=1)
    planned = plan_memory(plan).planned
    assert planned[NCCL] == NCCL_BYTES
    # Rows of 96 numbers take the place of 128.
    assert planned[RANK_SUMS] == buffer_bytes(4, BLOCK_BYTES) + buffer_bytes(4, 256)


def test_single_gpu_and_ranks_on_a_cpu_have_no_such_buffers(model: Path, gpus: None) -> None:
    alone, on_cpu = ModelPlan(config(model, 1, "cuda")), ModelPlan(config(model, 2, "cpu"))
    assert sum_bytes(alone) == sum_bytes(on_cpu) == 0
    assert NCCL not in plan_memory(alone).planned
