"""The memory that a step takes on a GPU: what the allocator holds, not only its tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.memory import profile
from engine.memory.graph_shapes import GraphShape
from engine.memory.profile import peak_of, profile_steps


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


def test_profile_captures_the_graphs_that_take_the_most_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of decodes and of steps with chunks, the two largest, with adapters if there are some."""
    mixed = [GraphShape(0, 16), GraphShape(3, 16)]
    plan: Any = SimpleNamespace(
        kind="decoder",
        config=SimpleNamespace(max_num_seqs=64),
        mixed_graph_shapes=mixed,
        adapters=object(),
    )
    monkeypatch.setattr(profile, "largest_step", lambda plan: None)
    monkeypatch.setattr(profile, "prompt_logprobs_step", lambda plan: None)
    monkeypatch.setattr(profile, "peak_of", lambda compute: compute() or 5)
    monkeypatch.setattr(profile, "kept_by", lambda compute: compute() or 1)
    captured: list[GraphShape] = []
    found = profile_steps(plan, lambda step: None, lambda: captured.append)
    assert captured[:2] == [GraphShape(64, has_adapters=True), GraphShape(56, has_adapters=True)]
    assert captured[2:] == [shape._replace(has_adapters=True) for shape in reversed(mixed)]
    sizes = 15  # 1 to 8, and multiples of 8 up to 64, with and without adapters
    assert found.graph_bytes == 1 + 2 * sizes + 2 * len(mixed)
