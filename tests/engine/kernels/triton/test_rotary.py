"""The fused launch of rotation, head norms and KV write against the separate operations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.kernels.triton.chips import Features, force
from engine.ops.rotary import (
    HeadNorm,
    apply_rotary,
    apply_rotary_pairs,
    norm_and_rotate,
    rotate_and_store,
)
from tests.support.tolerances import TOLERANCE, check

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SIZE = 16  # tokens per block


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def angles(tokens: int, dim: int, dtype: torch.dtype, *, pairs: bool = False):
    """Return cosines and signed sines [T, 1, D] in either layout."""
    half = draw(tokens, 1, dim // 2, dtype=torch.float64, seed=9)
    cos, sin = [half.cos()] * 2, [-half.sin(), half.sin()]
    join = (lambda t: torch.stack(t, -1).flatten(-2)) if pairs else (lambda t: torch.cat(t, -1))
    return join(cos).to(dtype), join(sin).to(dtype)


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    norm: str | None = None
    width: int | None = None  # rotated dimensions; None: all of them
    pairs: bool = False


CASES = [
    Case(1, 1, 64),
    Case(6, 2, 80),
    Case(3, 1, 96, "first"),
    Case(2, 2, 128, "offset"),
    Case(4, 2, 256, "first"),
    Case(4, 4, 64, "last"),
    Case(2, 1, 8, "weightless"),
    Case(4, 2, 128, width=96),
    Case(2, 1, 80, "first", width=32),
    Case(2, 1, 64, width=0),
    Case(2, 1, 64, "first", pairs=True),
    Case(4, 2, 80, width=32, pairs=True),
]


def head_norm(case: Case, dtype: torch.dtype) -> HeadNorm | None:
    q_weight, k_weight = (draw(case.dim, dtype=dtype, seed=seed) + 1 for seed in (4, 5))
    match case.norm:
        case "first":
            return HeadNorm(q_weight, k_weight, 1e-6)
        case "offset":
            return HeadNorm(q_weight, k_weight, 1e-5, offset=True)
        case "last":
            return HeadNorm(None, None, 1e-6, after=True)
        case "weightless":
            return HeadNorm(None, None, 0.1)
    return None


@pytest.mark.variants(24)
@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotate_and_store_equals_separate_ops(case: Case, tokens: int, dtype: torch.dtype) -> None:
    """Slots of other tokens keep their contents."""
    heads, kv_heads, dim = case.heads, case.kv_heads, case.dim
    qkv = draw(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    before = qkv.clone()
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    width = dim if case.width is None else case.width
    turn = angles(tokens, width, dtype, pairs=case.pairs) if width else None
    blocks = torch.tensor([3, 1, 3, 0, 5])[:tokens]
    offsets = torch.tensor([15, 0, 7, 7, 1])[:tokens]
    caches = [draw(6, kv_heads, SIZE, dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    due_caches = [cache.clone() for cache in caches]
    norm = head_norm(case, dtype)
    qk, pairs = qkv[:, : heads + kv_heads], case.pairs
    turned = norm_and_rotate(qk, heads, turn, norm, pairs=pairs, kernels="torch")
    due, turned = turned[:, :heads], turned[:, heads:]
    due_caches[0][blocks, :, offsets] = turned
    due_caches[1][blocks, :, offsets] = v
    found = rotate_and_store((q, k, v), turn, (*caches, blocks, offsets), norm, pairs=pairs)
    assert found.is_contiguous()
    check(found, due)
    check(caches[0], due_caches[0])
    untouched = torch.ones(6, SIZE, dtype=torch.bool)
    untouched[blocks, offsets] = False
    untouched = untouched[:, None].expand(6, kv_heads, SIZE)
    assert torch.equal(caches[0][untouched], due_caches[0][untouched])
    assert torch.equal(caches[1], due_caches[1])
    assert torch.equal(qkv, before)


@dtypes
@pytest.mark.parametrize("dim", [2, 64, 80])
def test_rotation_kernel_in_both_layouts_equals_torch(dim: int, dtype: torch.dtype) -> None:
    """The heads are a slice of a wider tensor."""
    x = draw(5, 4, dim, dtype=dtype)[:, 1:]
    for operation, pairs in ((apply_rotary, False), (apply_rotary_pairs, True)):
        cos, sin = angles(5, dim, dtype, pairs=pairs)
        due = operation(x, cos, sin, kernels="torch")
        check(operation(x, cos, sin, kernels="triton"), due)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[8]], ids=str)
def test_rotation_of_eight_heads_a_program_has_the_results_of_one(case: Case) -> None:
    """The head counts are no multiples of eight."""
    q, k, v = draw(3, 11 + 2 * 3, case.dim, dtype=torch.float32).split([11, 3, 3], dim=1)
    turn = angles(3, case.width or case.dim, torch.float32)
    norm = head_norm(case, torch.float32)
    slots = torch.tensor([3, 1, 2]), torch.tensor([15, 0, 7])
    found = []
    for together in (False, True):
        force(Features(rotates_heads_together=together))
        caches = [torch.zeros(6, 3, SIZE, case.dim) for _ in range(2)]
        try:
            queries = rotate_and_store((q, k, v), turn, (*caches, *slots), norm)
        finally:
            force(None)
        found.append((queries, *caches))
    for one, eight in zip(*found, strict=True):
        check(eight, one)
