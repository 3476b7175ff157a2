"""The kernels for adapters against torch."""

from __future__ import annotations

import pytest
import torch

from engine.ops.lora import Parts, add_lora
from tests.support.tolerances import TOLERANCE

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
CPU = torch.device("cpu")


class Case:
    """Random adapters of a layer, and tokens that use them in turn; slot 0 is among them."""

    def __init__(
        self, tokens: int, inputs: int, sizes: list[int], rank: int, slots: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.a = random(slots, len(sizes) * rank, inputs) * inputs**-0.5
        self.b = random(slots, sum(sizes), rank)
        self.x, self.y = random(tokens, inputs), random(tokens, sum(sizes))
        self.slots = (torch.arange(tokens) % (slots + 1)).int()
        ends = torch.tensor(sizes).cumsum(0).tolist()
        rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.parts = Parts.of(rows, CPU)

    def compute(self, kernels: str, tokens: slice = slice(None)) -> torch.Tensor:
        x, y, slots = self.x[tokens], self.y[tokens].clone(), self.slots[tokens]
        return add_lora(x, y, self.a, self.b, slots, self.parts, kernels=kernels)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 40, [24], 8, 1),
        (37, 200, [70, 20, 30], 8, 3),
        (19, 130, [64, 64], 20, 5),
        (3, 16, [5], 1, 8),
        (2, 16, [20, 8], 130, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora_kernels_equal_torch(
    sizes: tuple[int, int, list[int], int, int], dtype: torch.dtype
) -> None:
    case = Case(*sizes, dtype)
    rtol, atol = TOLERANCE[dtype]
    found, due = case.compute("triton"), case.compute("torch")
    torch.testing.assert_close(found, due, rtol=rtol, atol=4 * atol)
    without = case.slots == 0
    assert torch.equal(found[without], case.y[without]), "tokens without an adapter keep their bits"


def test_lora_kernel_bits_of_a_token_do_not_depend_on_others() -> None:
    case = Case(21, 96, [40, 40], 8, 3, torch.bfloat16)
    due = case.compute("triton")
    for tokens in (slice(3, 4), slice(2, 19), slice(5, 21)):
        assert torch.equal(case.compute("triton", tokens), due[tokens])


def test_lora_reference_is_the_formula() -> None:
    case = Case(9, 30, [12, 8], 4, 2, torch.float32)
    found = case.compute("torch")
    for token in range(9):
        slot = int(case.slots[token])
        due = case.y[token].clone()
        for place, rows in enumerate(case.parts.rows if slot else ()):
            a = case.a[slot - 1, place * 4 : place * 4 + 4]
            due[rows] += case.b[slot - 1, rows] @ (a @ case.x[token])
        torch.testing.assert_close(found[token], due)
