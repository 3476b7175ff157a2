"""Logits are fp32 for every form of the weight and any number of rows.

Logits rounded to bf16 would differ in steps of 1/8 only, and change with the batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels.numba import linear as numba_linear
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.weights.head import HeadWeight
from engine.layers.weights.pack import nbytes_of
from engine.ops.codes import Quantization, codes_linear
from engine.ops.kernels import Kernels, use_kernels
from engine.ops.linear import WIDENED
from tests.engine.layers.test_codes import random

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = (1, 2, 5, 33)
HIDDEN = 576
VOCABULARIES = (512, 97, 50257)  # whole panels; less than a panel more; GPT-2's
numba = pytest.param(
    "numba",
    marks=pytest.mark.skipif(
        not has_avx512_bf16(), reason="this CPU does not multiply bf16 (AVX512_BF16)"
    ),
)


def make_head(
    vocab_size: int, dtype: torch.dtype, kernels: Kernels, *, tied: bool = False
) -> LMHead:
    embedding = TokenEmbedding(vocab_size, HIDDEN) if tied else None
    head = LMHead(vocab_size, HIDDEN, tied_to=embedding)
    head.table.data = random(vocab_size, HIDDEN, seed=1).to(dtype)
    use_kernels(head, kernels)
    return head


def check_fp32(head: Any, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Check the logits of several numbers of rows against an exact product."""
    exact = x.double() @ weight.double().t()
    for rows in ROWS:
        logits = head(x[:rows])
        assert logits.dtype == torch.float32
        assert logits.shape == (rows, len(weight))
        rounded = logits.bfloat16().double()
        assert (rounded != logits).any(1).all(), f"{rows} rows: bf16 holds all logits of a row"
        error = (logits - exact[:rows]).abs().max()
        assert error < (rounded - exact[:rows]).abs().max() / 500, f"{rows} rows"


@pytest.mark.variants(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("kernels", ["torch", numba])
def test_logits_of_a_packed_bf16_head_are_fp32(
    kernels: Kernels, vocab_size: int, tied: bool
) -> None:
    head = make_head(vocab_size, torch.bfloat16, kernels, tied=tied)
    weight = head.table.data.clone()
    head.prepack()
    assert head.tensors.packed_bytes == nbytes_of(
        vocab_size, HIDDEN, True, torch.bfloat16, kernels, None
    )
    check_fp32(head, weight, random(33, HIDDEN).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [97, WIDENED + 5])
def test_logits_of_a_plain_head_are_fp32(dtype: torch.dtype, vocab_size: int) -> None:
    head = make_head(vocab_size, dtype, "torch")
    check_fp32(head, head.table.data, random(33, HIDDEN).to(dtype))


def test_logits_of_a_packed_fp16_head_are_fp32() -> None:
    head = make_head(97, torch.float16, "numba")
    weight = head.table.data.clone()
    head.prepack()
    check_fp32(head, weight, random(33, HIDDEN).half())


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kernels", ["torch", numba])
def test_logits_of_a_quantized_head_are_fp32(kernels: Kernels, quantization: Quantization) -> None:
    head = make_head(512, torch.bfloat16, kernels)
    head.prepack(quantization)
    x = random(33, HIDDEN).bfloat16()
    together = head(x)
    assert together.dtype == torch.float32
    assert (together.bfloat16() != together).any(1).all()
    for rows in ROWS:
        torch.testing.assert_close(head(x[:rows]), together[:rows], rtol=1e-5, atol=1e-4)


def test_reference_product_of_codes_is_not_rounded_before_fp32() -> None:
    """Where no kernel multiplies the codes."""
    from engine.layers.weights.code_rows import code_rows

    rows = code_rows(random(97, HIDDEN, seed=1), "int8")
    weight = rows.dequantize().bfloat16()

    def product(x: torch.Tensor) -> torch.Tensor:
        return codes_linear(x, rows, None, torch.float32, kernels="torch")

    check_fp32(product, weight, random(33, HIDDEN).bfloat16())


@pytest.mark.skipif(not has_avx512_bf16(), reason="this CPU does not multiply bf16 (AVX512_BF16)")
def test_head_with_amx_multiplies_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, oneDNN computes other layers from five rows on, and would round the logits."""
    monkeypatch.setattr(numba_linear, "uses_amx", lambda device, dtype: True)
    weight = random(512, HIDDEN, seed=1).bfloat16()
    head = HeadWeight(weight, kernels="numba")
    x = random(33, HIDDEN).bfloat16()
    check_fp32(head, weight, x)
    together = head(x)
    for rows in ROWS:
        assert torch.equal(head(x[:rows]), together[:rows]), "the batch changes bits"


# ---- the rows of a tied embedding ------------------------------------------------------------


def lookup_of(head: LMHead, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, with repetitions and the last one, and the rows that the embedding finds."""
    assert head.tied_to is not None
    ids = torch.randint(0, vocab_size, (70,), generator=torch.Generator().manual_seed(3))
    ids[5], ids[6] = vocab_size - 1, ids[7]
    return ids, head.tied_to(ids)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("kernels", ["torch", numba])
def test_rows_of_a_tied_embedding_are_those_of_its_table(kernels: Kernels, vocab_size: int) -> None:
    """Where our own kernel multiplies the head, the table is not kept a second time."""
    head = make_head(vocab_size, torch.bfloat16, kernels, tied=True)
    table = head.table.data.clone()
    assert head.tied_to is not None
    use_kernels(head.tied_to, kernels)
    head.prepack()
    assert (head.tied_to.weight is None) == (kernels == "numba")
    ids, rows = lookup_of(head, vocab_size)
    assert torch.equal(rows, table[ids])
    assert torch.equal(head.tied_to(ids[:1]), table[ids[:1]])


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("kernels", ["torch", numba])
def test_rows_of_a_tied_embedding_are_not_rounded_with_the_head(
    kernels: Kernels, quantization: Quantization
) -> None:
    head = make_head(97, torch.bfloat16, kernels, tied=True)
    table = head.table.data.clone()
    head.prepack(quantization)
    ids, rows = lookup_of(head, 97)
    assert torch.equal(rows, table[ids])
