"""Adapters of one linear layer, packed: kernels are chosen before another thread prepares any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.device.openmp import recorded
from engine.layers.lora import LinearShape, PackedAdapters, Tokens
from engine.ops.lora import AdapterGroup, TokenAdapters

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = LinearShape(
    96, 192, {"q": slice(0, 128), "k": slice(128, 192)}, torch.bfloat16, torch.device("cpu")
)


def given(seed: int, rank: int, *parts: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for part in parts:
        rows = SHAPE.parts[part]
        b = torch.randn(rows.stop - rows.start, rank, generator=generator)
        found[part] = torch.randn(rank, 96, generator=generator) * 0.1, b
    return found


def test_packed_adapters_prepare_without_running_a_kernel() -> None:
    adapters = PackedAdapters(SHAPE, Tokens(), 2, "numba")
    adapters.choose_kernels(40)
    launched: list[Any] = []
    with recorded(lambda kernel, call: launched.append(kernel)):
        for rank in (1, 33, 40):
            adapters.prepare(given(rank, rank, "q", "k"))
    assert not launched, "a step that is recorded meanwhile would repeat them"


def test_packed_adapters_change_only_their_tokens_and_parts() -> None:
    tokens = Tokens()
    adapters = PackedAdapters(SHAPE, tokens, 2, "numba")
    low_rank = given(1, 8, "q", "k")
    for slot, parts in enumerate((("q", "k"), ("k",)), 1):
        adapters.write(slot, adapters.prepare({part: low_rank[part] for part in parts}))
    x, y = torch.randn(5, 96).bfloat16(), torch.randn(5, 192).bfloat16()
    groups = (
        AdapterGroup(1, 1, torch.tensor([3])),
        AdapterGroup(2, 2, torch.tensor([0, 4])),
    )
    tokens.current = TokenAdapters(torch.tensor([2, 0, 0, 1, 2]), groups)
    found = adapters.add(x, y.clone())
    due = y.float()
    for token, parts in ((0, "k"), (3, "qk"), (4, "k")):
        for part in parts:
            a, b = low_rank[part]
            due[token, SHAPE.parts[part]] += b @ (a @ x[token].float())
    torch.testing.assert_close(found.float(), due, rtol=2e-2, atol=5e-2)
    assert torch.equal(found[1:3], y[1:3])
    assert torch.equal(found[[0, 4], :128], y[[0, 4], :128])
    adapters.write(1, None)
    assert torch.equal(adapters.add(x, y.clone())[3], y[3])
