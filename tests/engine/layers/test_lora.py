"""Adapters of one linear layer on a CPU, multiplied group by group and all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.device.openmp import recorded
from engine.layers.lora import LinearAdapters, LinearShape, PackedAdapters, PanelAdapters, Tokens
from engine.ops.lora import AdapterGroup, TokenAdapters

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = LinearShape(
    96, 192, {"q": slice(0, 128), "k": slice(128, 192)}, torch.bfloat16, torch.device("cpu")
)


def given(seed: int, rank: int, *parts: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for part in parts:
        rows = SHAPE.slices[part]
        b = torch.randn(rows.stop - rows.start, rank, generator=generator)
        found[part] = torch.randn(rank, 96, generator=generator) * 0.1, b
    return found


needs_kernel = pytest.mark.skipif(
    not PanelAdapters.can_compute(SHAPE, "numba"), reason="this CPU has no AVX512_BF16"
)


def panels(tokens: Tokens) -> PanelAdapters:
    return PanelAdapters(SHAPE, tokens, 2, 40)


def packed(tokens: Tokens) -> PackedAdapters:
    return PackedAdapters(SHAPE, tokens, 2)


@needs_kernel
def test_adapters_are_prepared_without_running_a_kernel() -> None:
    adapters = panels(Tokens())
    launched: list[Any] = []
    with recorded(lambda kernel, call: launched.append(kernel)):
        for rank in (1, 33, 40):
            adapters.prepare(given(rank, rank, "q", "k"))
    assert not launched, "a step that is recorded meanwhile would repeat them"


@pytest.mark.parametrize("make", [packed, pytest.param(panels, marks=needs_kernel)])
def test_adapters_change_only_their_tokens_and_parts(
    make: Callable[[Tokens], LinearAdapters],
) -> None:
    tokens = Tokens()
    adapters = make(tokens)
    low_rank = given(1, 8, "q", "k"), given(2, 24, "k")
    for slot, parts in enumerate(low_rank, 1):
        adapters.write(slot, adapters.prepare(parts))
    torch.manual_seed(0)
    x, y = torch.randn(5, 96).bfloat16(), torch.randn(5, 192).bfloat16()
    groups = (
        AdapterGroup(1, 1, torch.tensor([3])),
        AdapterGroup(2, 2, torch.tensor([0, 4])),
    )
    slots = torch.tensor([2, 0, 0, 1, 2], dtype=torch.int32)
    tokens.current = TokenAdapters(slots, groups)
    found = adapters.add(x, y.clone())
    due = y.float()
    for token, slot in ((0, 2), (3, 1), (4, 2)):
        for part, (a, b) in low_rank[slot - 1].items():
            due[token, SHAPE.slices[part]] += b @ (a @ x[token].float())
    torch.testing.assert_close(found.float(), due, rtol=2e-2, atol=5e-2)
    assert torch.equal(found[1:3], y[1:3])
    assert torch.equal(found[[0, 4], :128], y[[0, 4], :128])
    adapters.write(1, None)
    assert torch.equal(adapters.add(x, y.clone())[3], y[3])


@needs_kernel
def test_tokens_of_each_batch_are_sorted() -> None:
    tokens = Tokens()
    adapters = panels(tokens)
    adapters.write(1, adapters.prepare(given(1, 8, "q")))
    x, y = torch.randn(2, 96).bfloat16(), torch.zeros(2, 192).bfloat16()
    for slots in ([1, 0], [0, 1], [0, 0]):
        tokens.current = TokenAdapters(torch.tensor(slots, dtype=torch.int32))
        assert adapters.add(x, y).any(1).tolist() == [bool(slot) for slot in slots]
