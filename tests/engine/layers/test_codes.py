"""Quantised weights: their definition in NumPy, and the kernel against exact whole numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.kernels.numba.call import OUTLIER_FROM
from engine.kernels.numba.codes import CodesLinear, has_instructions
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.layers.weights.code_rows import CodeRowsWeight, code_rows
from engine.layers.weights.head import HeadWeight
from engine.layers.weights.onednn import PackedWeight
from engine.layers.weights.pack import nbytes_of, pack
from engine.ops.codes import Quantization
from engine.ops.kernels import use_kernels
from engine.ops.quantize import Codes, Float8Codes, quantize

pytestmark = pytest.mark.usefixtures("one_thread")
needs_vnni = pytest.mark.skipif(
    not has_instructions(), reason="this CPU does not multiply 8-bit numbers (AVX512_VNNI)"
)
KINDS: list[Quantization] = ["int8", "int4"]
ALL_KINDS: list[Quantization] = [*KINDS, "fp8"]
SHAPES = [(16, 32), (50, 64), (960, 576), (128, 1536)]  # (outputs, inputs)
ROWS = [*range(1, 10), 33]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- the definition --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_definition(kind: Quantization) -> None:
    """In NumPy: the nearest step of each group of 32, in fp32, with scales in fp16."""
    weight = random(7, 96).numpy()
    groups = weight.reshape(7, 3, 32)
    low = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    if kind == "int8":
        scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
        low = -128 * scale.astype(np.float32)
    else:
        height = groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)
        scale = (height / np.float32(15)).astype(np.float16)
    step = scale.astype(np.float32)
    middle = 128 if kind == "int8" else 0
    due = np.rint((groups - (0 if middle else low)) / step) + middle
    found = quantize(torch.from_numpy(weight), kind)
    assert np.array_equal(found.codes.numpy().reshape(7, 3, 32), np.clip(due, 0, 2**found.bits - 1))
    numbers = found.dequantize().numpy().reshape(7, 3, 32)
    assert np.allclose(numbers, due * step + low, rtol=0, atol=1e-6)
    assert (np.abs(numbers - groups) <= 0.52 * step + 2e-3).all()


def e4m3_numbers() -> NDArray[np.float32]:
    """Return the finite numbers from 0 up, in the order of the codes (arXiv 2209.05433)."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return np.where(exponent == 0, 2.0**-6 * mantissa / 8, normal).astype(np.float32)


@pytest.mark.parametrize("inputs", [7, 128, 320])
def test_fp8_codes_are_those_of_the_definition(inputs: int) -> None:
    """In NumPy: the nearest number of e4m3, of two the even code; fp32 scales for 128 inputs."""
    weight = random(9, inputs).numpy()
    weight[2] = 0
    weight[3] *= 1e-6
    groups = -(-inputs // 128)
    scales = np.empty((9, groups), np.float32)
    for group in range(groups):
        scales[:, group] = np.abs(weight[:, 128 * group : 128 * (group + 1)]).max(1) / 448
    by_input = np.repeat(scales, 128, 1)[:, :inputs]
    steps = weight / np.where(by_input == 0, np.float32(1), by_input)
    table = e4m3_numbers()
    distance = np.abs(np.abs(steps)[..., None].astype(np.float64) - table)
    is_odd = np.arange(127) & 1
    nearest = np.lexsort((np.broadcast_to(is_odd, distance.shape), distance))[..., 0]
    found = quantize(torch.from_numpy(weight), "fp8")
    assert isinstance(found, Float8Codes)
    assert np.array_equal(found.scales.numpy(), scales)
    codes = found.codes.view(torch.uint8).numpy()
    assert np.array_equal(codes & 127, nearest)
    assert np.array_equal(codes >> 7, np.signbit(steps))
    due = np.copysign(table[nearest], steps) * by_input
    assert np.array_equal(found.dequantize().numpy(), due)
    assert (np.abs(due - weight) <= np.abs(weight) / 16 + by_input * 2.0**-10).all()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("outputs", [1, 50])
def test_rows_for_a_gpu_have_the_same_numbers(outputs: int, kind: Quantization) -> None:
    weight = random(outputs, 160)
    rows = code_rows(weight, kind)
    assert torch.equal(rows.dequantize(), quantize(weight, kind).dequantize())
    packed = CodeRowsWeight(weight, kind, kernels="torch")
    assert packed.nbytes == nbytes_of(outputs, 160, False, torch.bfloat16, "triton", kind)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_weights_that_have_codes_already_are_kept(kind: Quantization) -> None:
    weight = quantize(random(48, 128), kind).dequantize()
    assert torch.allclose(quantize(weight, kind).dequantize(), weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_weight_of_zeros_stays_zero(kind: Quantization) -> None:
    assert not quantize(torch.zeros(16, 64), kind).dequantize().any()


# ---- the kernel ------------------------------------------------------------------------------


def multiplier(codes: Codes, bias: torch.Tensor | None = None, *, wide: bool = True) -> CodesLinear:
    parts = codes.codes, codes.scales, codes.offsets, codes.bits
    return CodesLinear(*parts, bias, wide=wide)


@needs_vnni
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["middle", "offsets"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_whole_numbers_are_exact(
    shape: tuple[int, int], bits: int, has_offsets: bool
) -> None:
    """Inputs up to 127, and 127 in each group, are rounded to themselves; scales are 1."""
    generator = torch.Generator().manual_seed(2)
    given = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)
    groups = (shape[0], shape[1] // 32)
    offsets = torch.randint(-9, 9, groups, generator=generator).half() if has_offsets else None
    codes = Codes(given, torch.ones(groups).half(), offsets, bits)
    x = torch.randint(-127, 128, (max(ROWS), shape[1]), generator=generator)
    x.unflatten(1, (-1, 32))[:, :, 5] = 127
    due = x @ codes.dequantize().long().t()
    multiply = multiplier(codes)
    for rows in ROWS:
        assert torch.equal(multiply(x[:rows].bfloat16()).long(), due[:rows])


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_those_of_the_rounded_weight(
    shape: tuple[int, int], kind: Quantization
) -> None:
    codes, bias = quantize(random(*shape), kind), random(shape[0], seed=4).bfloat16()
    x = random(max(ROWS), shape[1], seed=3).bfloat16()
    due = x.float() @ codes.dequantize().t()
    wide, biased = multiplier(codes), multiplier(codes, bias, wide=False)
    together = wide(x)
    assert together.dtype == torch.float32
    assert (together - due).norm() < 0.01 * due.norm()
    for rows in ROWS:
        assert torch.equal(wide(x[:rows]), together[:rows]), "the batch changes bits"
        assert torch.equal(wide(x[-rows:]), together[-rows:])
        assert torch.equal(biased(x[:rows]), (together[:rows] + bias.float()).bfloat16())


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 39, 40, 575])
def test_outliers_are_exact_and_take_no_precision_from_their_group(
    kind: Quantization, place: int
) -> None:
    """Within 8 bits the error would be ten times the limit."""
    codes, x = quantize(random(64, 576), kind), random(9, 576, seed=3)
    others = x @ codes.dequantize().t()
    x[:, place] = 100
    x = x.bfloat16()
    due = x.float() @ codes.dequantize().t()
    assert (multiplier(codes)(x) - due).norm() < 0.01 * others.norm()


@needs_vnni
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["middle", "offsets"])
def test_products_of_the_most_outliers_are_exact(bits: int, has_offsets: bool) -> None:
    """One more would raise the root mean square above the limit. The other inputs are 0."""
    generator = torch.Generator().manual_seed(2)
    given = torch.randint(0, 1 << bits, (33, 576), generator=generator, dtype=torch.uint8)
    groups = (33, 18)
    offsets = torch.randint(-9, 9, groups, generator=generator).half() if has_offsets else None
    codes = Codes(given, torch.ones(groups).half(), offsets, bits)
    most = math.ceil(576 / OUTLIER_FROM**2) - 1
    x = torch.zeros(9, 576)
    for row in x:
        row[torch.randperm(576, generator=generator)[:most]] = 258
    x = x.bfloat16()
    due = x.double() @ codes.dequantize().double().t()
    assert torch.equal(multiplier(codes)(x).double(), due)


@needs_vnni
def test_rows_with_a_stride_of_zeros_and_of_one_large_number() -> None:
    codes = quantize(random(64, 64), "int4")
    multiply = multiplier(codes)
    wide_rows = random(4, 128, seed=5).bfloat16()
    assert torch.equal(multiply(wide_rows[:, :64]), multiply(wide_rows[:, :64].contiguous()))
    assert not multiply(torch.zeros(3, 64).bfloat16()).any()
    spike = torch.zeros(1, 64).bfloat16()
    spike[0, 9] = 3e4
    assert torch.allclose(multiply(spike), 3e4 * codes.dequantize()[:, 9], rtol=1e-2, atol=1)


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_input_that_is_not_finite_makes_its_row_nan_and_no_other(
    kind: Quantization, bad: float
) -> None:
    """The request of this row then ends with an error, not with made-up numbers."""
    multiply = multiplier(quantize(random(48, 96), kind))
    x = random(9, 96, seed=1).bfloat16()
    due = multiply(x)
    x[4, 40] = bad
    found = multiply(x)
    assert found[4].isnan().all()
    assert torch.equal(found[:4], due[:4])
    assert torch.equal(found[5:], due[5:])


@needs_vnni
def test_all_threads_get_the_same_bits() -> None:
    codes = quantize(random(192, 576), "int8")
    x = random(9, 576, seed=1).bfloat16()
    due = multiplier(codes)(x)
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        multiply = multiplier(codes)
        for _ in range(20):
            assert torch.equal(multiply(x), due)


# ---- layers ----------------------------------------------------------------------------------


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_the_bytes_of_the_format(kind: Quantization) -> None:
    layer, head = Linear(576, 960), LMHead(512, 576)
    for module in (layer, head):
        assert module.weight is not None
        module.weight.data = random(*module.weight.shape).bfloat16()
        plain = module.weight.nbytes / 2
        use_kernels(module, "numba")
        module.prepack(kind)
        assert module.tensors.packed is not None
        bits = 5 if kind == "int4" and module is layer else 8.5
        assert module.tensors.packed.nbytes == plain * bits / 8
        shape = (960, 576) if module is layer else (512, 576)
        planned = nbytes_of(*shape, module is head, torch.bfloat16, "numba", kind)
        assert module.tensors.packed.nbytes == planned


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_without_a_kernel_the_weight_is_rounded(kind: Quantization) -> None:
    weight, x = random(64, 96), random(5, 96, seed=1)
    packed = pack(weight, None, kernels="torch", quantization=kind)
    assert isinstance(packed, PackedWeight)
    torch.testing.assert_close(packed(x), x @ quantize(weight, kind).dequantize().t())


def test_weight_whose_inputs_fill_no_groups_is_not_quantized() -> None:
    weight, x = random(64, 40), random(5, 40, seed=1)
    packed = pack(weight, None, kernels="torch", quantization="int4")
    assert packed is not None
    torch.testing.assert_close(packed(x), x @ weight.t())


def test_fp8_on_a_cpu_is_rounded_only_and_so_is_its_head() -> None:
    """Also where a kernel for int8 would run."""
    weight, x = random(64, 96).bfloat16(), random(5, 96, seed=1).bfloat16()
    for is_head, kind in ((False, "fp8"), (True, "int8")):
        packed = pack(weight, None, kernels="numba", is_head=is_head, quantization="fp8")
        assert isinstance(packed, HeadWeight if is_head else PackedWeight)
        due = x.float() @ quantize(weight, kind).dequantize().bfloat16().float().t()
        torch.testing.assert_close(packed(x).float(), due, rtol=1e-2, atol=1e-2)
        assert packed.nbytes == nbytes_of(64, 96, is_head, torch.bfloat16, "numba", "fp8")


def test_on_a_gpu_weights_stay_plain_or_have_codes() -> None:
    assert pack(random(64, 96), None, kernels="triton") is None
    assert pack(random(64, 40), None, kernels="triton", quantization="int4") is None
    packed = pack(random(64, 40), None, kernels="triton", quantization="fp8")
    assert isinstance(packed, CodeRowsWeight)
    head = pack(random(64, 96), None, kernels="triton", is_head=True, quantization="int4")
    assert isinstance(head, CodeRowsWeight)
    assert head.rows.kind == "int8"
    layer = Linear(40, 64)
    use_kernels(layer, "triton")
    layer.prepack("int4")
    assert layer.weight is not None


@needs_vnni
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["middle", "offsets"])
def test_rows_of_packed_codes_are_the_dequantised_numbers(bits: int, has_offsets: bool) -> None:
    """Also with scales below the normal numbers of fp16, and in the last, padded panel."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 2**bits, (41, 96), dtype=torch.uint8, generator=generator)
    scales = (random(41, 3) * 2.0 ** torch.randint(-24, 3, (41, 3), generator=generator)).half()
    offsets = (random(41, 3, seed=1) * 10).half() if has_offsets else None
    assert ((scales != 0) & (scales.abs() < torch.finfo(torch.float16).tiny)).any()
    table = Codes(codes, scales, offsets, bits).dequantize().bfloat16()
    packed = CodesLinear(codes, scales, offsets, bits, wide=True)
    for ids in (torch.arange(41), torch.tensor([40, 3, 3]), torch.tensor([17])):
        assert torch.equal(packed.rows(ids), table[ids])
