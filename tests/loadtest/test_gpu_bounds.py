"""Theoretical bounds for GPU performance, compared with values calculated by hand."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine.memory.report import MARGIN
from engine.protocol.ready import MemoryEntry
from loadtest.gpu.bench import Bench
from loadtest.gpu.device import ledger
from loadtest.gpu.models import CONFIGS, Chip, Shape
from loadtest.gpu.sections import DECODE_GOALS

H200 = Chip(read=4.3e12, matmul=790e12)


@pytest.mark.parametrize(
    ("model", "gigabytes", "kv", "batch_1", "batch_256"),
    [
        ("llama-3.1-8b", 15.01, 131072, 284, 19915),
        ("qwen3-0.6b", 1.19, 114688, 3284, 34697),
        ("gemma-2-2b", 5.23, 106496, 806, 31271),
        ("gemma-2-9b", 18.48, 344064, 228, 9494),
    ],
)
def test_decode_bound_is_time_to_read_weights_and_kv(
    model: str, gigabytes: float, kv: int, batch_1: int, batch_256: int
) -> None:
    shape = Shape.of(CONFIGS[model])
    assert 2 * (shape.linear + shape.head) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert shape.kv_bytes == kv
    for batch, rate in ((1, batch_1), (256, batch_256)):
        assert batch / shape.decode_seconds([1024] * batch, H200) == pytest.approx(rate, abs=1)


def test_prefill_bound_of_8b_matches_hand_calculation() -> None:
    shape = Shape.of(CONFIGS["llama-3.1-8b"])
    assert shape.prefill_flops(1024) / H200.matmul == pytest.approx(18.4e-3, rel=0.01)
    assert shape.prefill_flops(8192) / H200.matmul == pytest.approx(167e-3, rel=0.01)


def test_offline_bound_of_nano_vllm_workload_matches_hand_calculation() -> None:
    random = Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(random.randint(100, 1024))
        for _ in range(prompts[-1]):
            random.randint(0, 10000)
    outputs = [random.randint(100, 1024) for _ in range(256)]
    assert (sum(prompts), sum(outputs)) == (142_827, 133_966)
    seconds = Shape.of(CONFIGS["qwen3-0.6b"]).offline_seconds(prompts, outputs, H200)
    assert sum(outputs) / seconds == pytest.approx(36_203, rel=0.001)


def test_goals_are_shares_and_hold_for_every_chip() -> None:
    """A goal in tokens/s would be one chip's."""
    for goals in DECODE_GOALS.values():
        assert all(0 < share <= 100 for share in goals.values())


def test_ledger_leaves_out_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (MemoryEntry("weights", 300, 310), MemoryEntry(MARGIN, 50), MemoryEntry("graphs", 90))
    facts = SimpleNamespace(memory=entries)
    runner = SimpleNamespace(device=torch.device("cpu"))
    engine = SimpleNamespace(loaded=SimpleNamespace(facts=facts), runner=runner, generate=len)
    free = iter([1000, 600])  # 400 bytes are in use: 310 and 90
    monkeypatch.setattr("loadtest.gpu.device.available_memory", lambda device: next(free))
    bench = SimpleNamespace(
        device="cpu", smoke=True, engine=lambda *a, **k: engine, works=lambda *a: []
    )
    measured, planned = ledger(cast(Bench, bench))
    assert measured.value == 0
    assert planned.value == pytest.approx(100 * 10 / 400)
