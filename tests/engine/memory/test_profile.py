"""The memory that a step takes on a GPU: what the allocator holds, not only its tensors."""

from __future__ import annotations

import pytest
import torch

from engine.memory.profile import peak_of


@pytest.mark.parametrize(
    ("allocated", "reserved", "due"),
    [
        ((100, 700), (200, 1200), 1000),  # segments have unused ends
        ((100, 900), (500, 500), 800),  # the step fits into segments that others hold in part
    ],
)
def test_peak_of_counts_what_the_allocator_takes(
    allocated: tuple[int, int],
    reserved: tuple[int, int],
    due: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pair is (before, at most), in bytes."""
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    values = dict(zip(("memory_allocated", "max_memory_allocated"), allocated, strict=True))
    values |= dict(zip(("memory_reserved", "max_memory_reserved"), reserved, strict=True))
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert peak_of(lambda: calls.append("compute")) == due
    assert calls.index("empty_cache") < calls.index("compute")
    assert calls.index("reset_peak_memory_stats") < calls.index("compute")
