"""The kernel for quantised weights against torch, which multiplies with the unpacked numbers."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.codes import FEW_ROWS_TILE, MAX_FEW_ROWS, MOST_ROWS, select_tile
from engine.layers.weights.code_rows import CodeRowsWeight, code_rows
from engine.ops.codes import CodeRows, Quantization, codes_linear
from tests.support.thorough import is_thorough
from tests.support.tolerances import check

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
KINDS: list[Quantization] = ["int8", "int4", "fp8"]
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
INPUTS = 2 * FEW_ROWS_TILE.inputs + 96  # several tiles, and a tail that is no whole fp8 group


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: Quantization, outputs: int = 37, inputs: int = INPUTS) -> CodeRows:
    return code_rows(draw(outputs, inputs) / inputs**0.5, kind)


def compare(
    x: torch.Tensor, rows: CodeRows, bias: torch.Tensor | None = None, dtype=torch.float32
) -> None:
    """Compare with sums in fp64 of the numbers in the dtype of x."""
    due = x.double() @ rows.dequantize().to(x.dtype).double().t()
    if bias is not None:
        due += bias.double()
    found = codes_linear(x, rows, bias, dtype, kernels="triton")
    assert found.dtype == dtype
    # The interpreter truncates the weight to bf16.
    check(found.to(x.dtype), due.to(x.dtype))


@pytest.mark.variants(7)
@kinds
@dtypes
@pytest.mark.parametrize(
    "rows", [1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (3, 16, 17)), 40]
)
def test_codes_kernel_every_form_and_dtype_equals_torch(
    rows: int, dtype: torch.dtype, kind: Quantization
) -> None:
    """Outputs fill no tile, inputs need several rounds, and more than 16 rows a larger tile."""
    x, bias = draw(rows, INPUTS, seed=1).to(dtype), draw(37, seed=2).to(dtype)
    compare(x, weight(kind))
    compare(x, weight(kind), bias, dtype)


@kinds
@pytest.mark.parametrize("sizes", [(1, 32), (129, 64), (5, 2080)], ids=str)
def test_codes_kernel_odd_sizes_and_strides_equal_torch(
    sizes: tuple[int, int], kind: Quantization
) -> None:
    outputs, inputs = sizes
    wide = draw(20, 2 * inputs, seed=1).bfloat16()
    for x in (wide[:2, :inputs], wide[:1, ::2], wide[:, inputs:]):
        compare(x, weight(kind, outputs, inputs))


@pytest.mark.parametrize("inputs", [1, 100, 129])
def test_codes_kernel_fp8_of_any_number_of_inputs_equals_torch(inputs: int) -> None:
    compare(draw(3, inputs).bfloat16(), weight("fp8", 20, inputs))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.variants(2)
def test_codes_kernel_rows_beyond_a_tile_equal_torch(
    kind: Quantization, dtype: torch.dtype
) -> None:
    x = draw(MOST_ROWS + 3, 160, seed=1).to(dtype)
    compare(x, weight(kind, 20, 160), dtype=dtype)
    assert codes_linear(x[:0], weight(kind, 20, 160), kernels="triton").shape == (0, 20)


@kinds
def test_codes_kernel_bits_of_a_row_are_equal_at_every_count_of_few_rows(
    kind: Quantization,
) -> None:
    x, rows = draw(MAX_FEW_ROWS, INPUTS, seed=1).bfloat16(), weight(kind)
    due = codes_linear(x, rows, dtype=torch.float32, kernels="triton")
    for count in range(1, MAX_FEW_ROWS) if is_thorough() else (1, 2, MAX_FEW_ROWS - 1):
        found = codes_linear(x[-count:], rows, dtype=torch.float32, kernels="triton")
        assert torch.equal(found, due[-count:])
    tiles = {select_tile(count, torch.bfloat16) for count in range(1, MAX_FEW_ROWS + 1)}
    assert len(tiles) == 1, "on a GPU, another tile may sum in another order"


def test_every_e4m3_code_has_its_number() -> None:
    """256 outputs of one input: the kernel returns the numbers themselves."""
    codes = torch.arange(256).to(torch.uint8)[:, None]
    codes = codes[codes & 127 != 127][:, None]  # without the two NaN
    rows = CodeRows("fp8", 1, codes, torch.ones(len(codes), 1), None)
    found = codes_linear(torch.ones(1, 1), rows, kernels="triton")
    assert torch.equal(found[0], codes[:, 0].view(torch.float8_e4m3fn).float())


@kinds
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of zero times inf
def test_weight_that_is_not_finite_makes_its_output_not_finite(
    kind: Quantization, bad: float
) -> None:
    """A request then ends with an error. Other outputs are as they were."""
    numbers = draw(20, 256)
    due = codes_linear(draw(2, 256, seed=1), code_rows(numbers, kind), kernels="triton")
    numbers[3, 140] = bad
    found = codes_linear(draw(2, 256, seed=1), code_rows(numbers, kind), kernels="triton")
    assert not found[:, 3].isfinite().any()
    others = torch.arange(20) != 3
    assert torch.equal(found[:, others], due[:, others])


@kinds
def test_weight_that_is_rounded_in_parts_is_the_same(
    kind: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = weight(kind)
    monkeypatch.setattr("engine.layers.weights.code_rows.VALUES_AT_ONCE", 3 * INPUTS)
    found = weight(kind)
    assert torch.equal(found.codes, due.codes)
    assert torch.equal(found.scales, due.scales)
    assert torch.equal(found.dequantize(), due.dequantize())


@kinds
def test_wide_weight_is_fp32_and_another_has_the_dtype(kind: Quantization) -> None:
    plain, x = draw(20, 64).bfloat16(), draw(2, 64, seed=1).bfloat16()
    for kernels in ("torch", "triton"):
        head = CodeRowsWeight(plain, kind, kernels=kernels, wide=True)
        layer = CodeRowsWeight(plain, kind, kernels=kernels)
        assert (head(x).dtype, layer(x).dtype) == (torch.float32, torch.bfloat16)
