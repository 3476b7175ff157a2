"""An arena gives memory to tensors, and takes it back when the last view of a tensor is gone."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from engine.ops.arena import Arena

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)


def numbers(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int8)


def taken(arena: Arena, example: torch.Tensor) -> torch.Tensor:
    tensor = arena.take(example)
    assert tensor is not None
    return tensor


def test_views_keep_the_memory_of_a_tensor() -> None:
    arena = Arena()
    tensor = taken(arena, torch.empty(4, 8))
    view = tensor.t()[2:].view(torch.int32)
    place = tensor.data_ptr()
    del tensor
    assert len(arena.taken) == 1
    assert taken(arena, torch.empty(4, 8)).data_ptr() != place
    del view
    assert not arena.taken
    assert taken(arena, torch.empty(4, 8)).data_ptr() == place


def test_aliases_do_not_keep_it() -> None:
    arena = Arena()
    tensor = taken(arena, torch.empty(4, 8, dtype=torch.bfloat16)).normal_()
    part = tensor[1:3, ::2]
    alias = arena.alias(part)
    assert torch.equal(alias, part)
    assert alias.data_ptr() == part.data_ptr()
    del tensor, part
    assert not arena.taken
    outside = torch.ones(3)
    assert arena.alias(outside) is outside
    assert not arena.holds(outside)
    assert arena.holds(alias)


@pytest.mark.parametrize(
    "example",
    [
        torch.empty(()),
        torch.empty(0, 3),
        torch.empty(3, 5, dtype=torch.bool),
        torch.empty(7, 2, dtype=torch.int64).t(),
        torch.empty(4, 3, 2, dtype=torch.bfloat16).permute(2, 0, 1),
    ],
    ids=lambda example: str(tuple(example.shape)),
)
def test_tensor_has_shape_strides_and_dtype_of_its_example(example: torch.Tensor) -> None:
    tensor = taken(Arena(), example)
    assert tensor.shape == example.shape
    assert tensor.stride() == example.stride()
    assert tensor.dtype == example.dtype
    assert tensor.data_ptr() % 64 == 0


def test_tensors_in_use_never_overlap() -> None:
    """Tensors come and go. Each keeps its numbers, and free memory is joined again."""
    rng = random.Random(0)
    arena = Arena(48 << 20)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            tensor, copy = held.pop(rng.randrange(len(held)))
            assert torch.equal(tensor, copy)
            del tensor
            continue
        example = torch.empty(rng.choice((1, 60, 5000, 200_000)), dtype=rng.choice(DTYPES))
        new = arena.take(example)
        if new is not None:
            copy = torch.randint(0, 2, new.shape).to(new.dtype)
            held.append((new.copy_(copy), copy))
            del new
    held.clear()
    gc.collect()
    assert not arena.taken
    whole = [span for span in arena._free if span.begin == 0]
    assert len(whole) == len(arena._free) == len(arena._chunks)
    assert sum(span.end for span in whole) == arena.num_bytes <= 48 << 20


def test_full_arena_gives_nothing_until_a_tensor_is_gone() -> None:
    arena = Arena(4 << 20)
    first = taken(arena, numbers(3 << 20))
    assert arena.take(numbers(2 << 20)) is None
    del first
    assert taken(arena, numbers(2 << 20)).numel() == 2 << 20
