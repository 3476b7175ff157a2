"""The kernel of linear layers in tiles (AMX).

Emulated, it equals a plain model bit by bit. The code for CPUs with AMX is compiled and read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.device import tiles as permission
from engine.device.tiles import tiles_refused
from engine.kernels.numba import linear
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.linear import (
    ANY_ROWS,
    IN_TILES,
    PackedLinear,
    PackedMultiply,
    multiply_for,
    narrow,
    packs_padded,
    padded_multiply,
)
from engine.kernels.numba.tiles import TileChecks, sums_agree
from engine.layers.weights.head import HeadWeight
from engine.layers.weights.onednn import PACKING_ROWS, PackedWeight
from engine.layers.weights.pack import nbytes_of
from tests.support.tile_model import in_guide_order, linear_in_tiles, tdpbf16ps

ROOT = Path(__file__).parents[4]
HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
pytestmark = pytest.mark.usefixtures("one_thread")
on_bf16_cpu = pytest.mark.skipif(
    not has_avx512_bf16(), reason="this CPU does not multiply bf16 (AVX512_BF16)"
)
INPUTS = (2, 30, 32, 34, 62, 96, 130)  # less than a tile, whole tiles, and parts of one behind them
ROWS = tuple(range(1, 71))


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> TileChecks:
    """Let layers multiply in emulated tiles. Returns the results of their checks."""
    checks = TileChecks()
    monkeypatch.setattr(linear, "EMULATES_TILES", True)
    monkeypatch.setattr(linear, "tiles_problem", lambda: None)
    monkeypatch.setattr(linear, "tile_checks", lambda: checks)
    return checks


def packed(weight: torch.Tensor, bias: torch.Tensor | None, width: int) -> PackedLinear:
    layer = linear.pack_panels(weight, width)
    return PackedLinear(weight, layer.packed, bias, width)


# ---- the plain model -------------------------------------------------------------------------


def rounded(number: Fraction) -> Fraction:
    """Round to the nearest fp32 number, ties to even; zero below the normal range."""
    if abs(number) < Fraction(2) ** -126:
        return Fraction(0)
    exponent = 0
    while abs(number) / Fraction(2) ** exponent >= 2:
        exponent += 1
    while abs(number) / Fraction(2) ** exponent < 1:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(number / unit) * unit


def test_model_follows_the_manual_in_exact_arithmetic() -> None:
    """Scalar by scalar as the manual writes it, with sums that lose bits."""
    random = np.random.default_rng(0)
    numbers = random.standard_normal((3, 32)) * 2.0 ** random.integers(-12, 12, (3, 32))
    a = torch.tensor(numbers).bfloat16().float().numpy()
    b = bf16(32, 4, seed=1).float().numpy()
    sums = random.standard_normal((3, 4)).astype(np.float32)
    found, other = tdpbf16ps(sums, a, b), in_guide_order(sums, a, b)
    for row, column in np.ndindex(3, 4):
        parts = [Fraction(0), Fraction(0)]
        for k in range(32):
            product = Fraction(float(a[row, k])) * Fraction(float(b[k, column]))
            parts[k % 2] = rounded(parts[k % 2] + product)
        total = rounded(Fraction(float(sums[row, column])) + rounded(parts[0] + parts[1]))
        assert Fraction(float(found[row, column])) == total
    assert (found != other).any(), "the two published orders differ in these numbers"
    np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-2)


def test_model_takes_numbers_below_the_normal_range_for_zeros() -> None:
    a, b = np.zeros((1, 32), np.float32), np.zeros((32, 1), np.float32)
    a[0, 0], b[0, 0] = 2.0**-127, 2.0**30
    assert tdpbf16ps(np.ones((1, 1), np.float32), a, b) == 1
    a[0, 0], b[0, 0] = 2.0**-100, 2.0**-27
    assert tdpbf16ps(np.zeros((1, 1), np.float32), a, b) == 0
    b[0, 0] = 2.0**-26
    assert tdpbf16ps(np.zeros((1, 1), np.float32), a, b) == 2.0**-126


# ---- equal bits ------------------------------------------------------------------------------


@on_bf16_cpu
@pytest.mark.variants(3)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_emulated_kernel_equals_the_model_for_all_counts_of_rows(
    emulated: TileChecks, width: int, biased: bool, wide: bool
) -> None:
    """The model knows no company of a row, so equal bits also mean that none matters.

    Rows of NaN lie before and behind the inputs, and columns of NaN between them.
    """
    for inputs in INPUTS:
        weight = bf16(128, inputs, seed=inputs)
        bias = bf16(128, seed=1) if biased else None
        room = torch.full((2 + ROWS[-1], inputs + 6), torch.nan).bfloat16()
        x = room[1:-1, 2 : 2 + inputs]
        x.copy_(bf16(*x.shape, seed=2))
        expected = linear_in_tiles(x, weight, bias)
        expected = expected if wide else expected.bfloat16()
        multiply = PackedMultiply(packed(weight, bias, width), IN_TILES, wide=wide)
        assert multiply.most == ANY_ROWS
        for rows in ROWS:
            # The last rows: NaN follows them.
            found = multiply(x[-rows:])
            assert torch.equal(found, expected[-rows:]), f"{inputs} inputs, {rows} rows"


@on_bf16_cpu
@pytest.mark.parametrize("at_once", [1, 2])
def test_emulated_kernel_many_inputs_divide_the_rows(emulated: TileChecks, at_once: int) -> None:
    """A chunk of rows meets several panels: here 32 of 70 rows, of 17 KB each."""
    x, weight = bf16(70, 8322), bf16(3 * 64, 8322, seed=1)
    multiply = PackedMultiply(packed(weight, None, 64), IN_TILES)
    multiply.call.at_once = at_once
    assert torch.equal(multiply(x), linear_in_tiles(x, weight, None).bfloat16())


@on_bf16_cpu
def test_emulated_kernel_writes_its_rows_only(emulated: TileChecks) -> None:
    """Into a slice of a wider tensor: around it nothing changes."""
    x, weight = bf16(37, 48), bf16(64, 48, seed=1)
    multiply = PackedMultiply(packed(weight, None, 64), IN_TILES)
    room = torch.full((39, 64 + 32), 7.0).bfloat16()
    multiply.empty = lambda rows: room[1:-1, 16:-16]  # type: ignore[method-assign]
    multiply.call.out_bytes = 2 * room.stride(0)
    multiply(x)
    assert torch.equal(room[1:-1, 16:-16], linear_in_tiles(x, weight, None).bfloat16())
    room[1:-1, 16:-16] = 7
    assert (room == 7).all()


@on_bf16_cpu
def test_emulated_kernel_in_many_threads_and_without_inputs(emulated: TileChecks) -> None:
    x, weight = bf16(40, 96), bf16(7 * 64, 96, seed=1)
    expected = linear_in_tiles(x, weight, None).bfloat16()
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        multiply = PackedMultiply(packed(weight, None, 64), IN_TILES)
        assert torch.equal(multiply(x), expected)
    torch.set_num_threads(1)
    nothing = narrow(torch.empty(32, 0, dtype=torch.bfloat16))
    assert torch.equal(nothing(x[:, :0]), torch.zeros(40, 32).bfloat16())


@on_bf16_cpu
def test_emulated_kernel_nan_and_inf_stay_in_their_row(emulated: TileChecks) -> None:
    x, weight = bf16(20, 80), bf16(64, 80, seed=1)
    multiply = PackedMultiply(packed(weight, None, 32), IN_TILES)
    right = multiply(x)
    x[1], x[18, 79] = torch.nan, torch.inf
    found = multiply(x)
    others = [row for row in range(20) if row not in (1, 18)]
    assert torch.equal(found[others], right[others])
    assert found[1].isnan().all()
    assert not found[18].isfinite().any()


AT_THE_END_OF_MEMORY = """
import ctypes, mmap, torch
from engine.kernels.numba import linear
from tests.engine.kernels.numba.test_tiles import bf16, packed
linear.EMULATES_TILES = True
PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def ends_in_no_mans_land(tensor):
    size = tensor.numel() * 2
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(address + pages * PAGE, PAGE, 0) == 0
    bytes = torch.frombuffer(memory, dtype=torch.bfloat16, offset=pages * PAGE - size,
                             count=tensor.numel())
    return bytes.view(tensor.shape).copy_(tensor)

for rows, inputs, width in ((1, 34, 64), (15, 32, 32), (17, 66, 16), (33, 96, 64), (64, 2, 16)):
    weight = bf16(64, inputs, seed=1)
    layer = packed(weight, ends_in_no_mans_land(bf16(64, seed=2)), width)
    layer = linear.PackedLinear(weight, ends_in_no_mans_land(layer.packed), layer.bias, width)
    multiply = linear.PackedMultiply(layer, None)
    inside = multiply(bf16(rows, inputs))
    multiply.empty = lambda rows: ends_in_no_mans_land(inside.new_empty(inside.shape))
    assert torch.equal(multiply(ends_in_no_mans_land(bf16(rows, inputs))), inside)
print("nothing beyond")
"""


@on_bf16_cpu
def test_emulated_kernel_touches_nothing_beyond_its_arguments() -> None:
    """Inputs, weights, bias and results end where a page without access begins."""
    ran = subprocess.run(
        [sys.executable, "-c", AT_THE_END_OF_MEMORY], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout == "nothing beyond\n", ran.stderr


# ---- the code for AMX ------------------------------------------------------------------------

COMPILE = """
import sys
from numba import cfunc
from engine.kernels.numba.compile import EXACT, _signature
from engine.kernels.numba.source.linear_tiles import tiles_kernel
body, call = tiles_kernel(*map(int, sys.argv[1:]), False)
print(cfunc(_signature(call), fastmath=EXACT, error_model="numpy")(body)._library.get_asm_str())
"""


def assembly_of(width: int, biased: bool, wide: bool) -> dict[str, list[str]]:
    """Return the lines of each function that multiplies in tiles, by its number of row tiles."""
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, map(int, (width, biased, wide)))],
        env=os.environ | {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    functions = re.findall(r"^multiply_tiles_(\d)_\S+:$(.*?)^\s+\.size", ran.stdout, re.M | re.S)
    return {row_tiles: body.split("\n") for row_tiles, body in functions}


def loops_of(lines: list[str]) -> list[list[str]]:
    """Return the innermost loops: from a label to the first jump back to it."""
    loops = []
    for end, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.\w+)$", line)
        begin = lines.index(f"{jump[1]}:") if jump and f"{jump[1]}:" in lines[:end] else None
        if begin is not None and not any(each.startswith(".L") for each in lines[begin + 1 : end]):
            loops.append(lines[begin:end])
    return loops


def count(lines: list[str], instruction: str) -> int:
    return sum(line.split()[:1] == [instruction] for line in lines)


@pytest.mark.parametrize(
    ("width", "biased", "wide"),
    [
        (64, False, False),
        (64, True, False),
        (64, False, True),
        (32, True, False),
        (16, False, True),
    ],
)
@pytest.mark.variants(1)
def test_code_for_amx_keeps_its_tiles_in_registers(width: int, biased: bool, wide: bool) -> None:
    """The loop over the inputs loads each tile once, and stores none."""
    functions = assembly_of(width, biased, wide)
    assert set(functions) == {"1", "2"}
    for row_tiles, lines in functions.items():
        columns = min(4 // int(row_tiles), width // 16)
        sums = int(row_tiles) * columns
        assert count(lines, "ldtilecfg") == 1, "configured once, before all loops"
        assert count(lines, "tilerelease") == 1
        assert count(lines, "tilezero") == count(lines, "tilestored") == sums, "no tile is spilled"
        assert count(lines, "tileloadd") == 2 * (int(row_tiles) + columns), "twice: the last inputs"
        assert count(lines, "tdpbf16ps") == 2 * sums
        (loop,) = (loop for loop in loops_of(lines) if count(loop, "tdpbf16ps"))
        assert count(loop, "tdpbf16ps") == sums
        assert count(loop, "tileloadd") == int(row_tiles) + columns
        assert count(loop, "tilestored") == 0
        assert not any("(%rsp" in line or "(%rbp" in line for line in loop), "nothing is spilled"


def test_code_for_amx_configures_every_tile_that_it_uses() -> None:
    """64 bytes a row, and 16 rows or those of the last tile: at 16 and 48 bytes of the settings."""
    for row_tiles, lines in assembly_of(64, False, False).items():
        (settings,) = (line for line in lines if line.split()[:1] == ["ldtilecfg"])
        base = int(re.findall(r"(\d*)\(%rsp\)", settings)[0] or 0)
        used = {int(number) for line in lines for number in re.findall(r"%tmm(\d)", line)}
        widths = stores(lines, "movw", base + 16, 2)
        heights = stores(lines, "movb", base + 48, 1)
        assert set(widths) == set(heights) == used, row_tiles
        assert set(widths.values()) == {"$64"}
        given = [number for number, rows in heights.items() if rows != "$16"]
        assert len({heights[number] for number in given}) == 1, "one count of rows of the last tile"
        # Sums and inputs of the last tile of rows, the inputs also from the copied last ones.
        sums = {int(line.split("tmm")[-1]) for line in lines if "tilezero" in line}
        assert len(sums & set(given)) == 4 // int(row_tiles)


def stores(lines: list[str], instruction: str, base: int, size: int) -> dict[int, str]:
    """Return what is stored to the eight numbers of this size from `base` on, by index."""
    found = {}
    for line in lines:
        store = re.match(rf"\s+{instruction}\s+(\S+), (\d*)\(%rsp\)", line)
        index, rest = divmod(int(store[2] or 0) - base, size) if store else (-1, 0)
        if store and rest == 0 and 0 <= index < 8:
            found[index] = store[1]
    return found


# ---- the check, and where tiles are used -----------------------------------------------------


def test_check_passes_both_published_orders_and_refuses_others() -> None:
    weight, bias = bf16(192, 90), bf16(192, seed=1)

    def right(x: torch.Tensor) -> torch.Tensor:
        return linear_in_tiles(x, weight, bias).bfloat16()

    assert sums_agree(right, weight, bias)
    assert sums_agree(lambda x: linear_in_tiles(x, weight, bias, in_guide_order), weight, bias)
    assert not sums_agree(right, weight, None), "the bias counts"
    for missing in (0, 89):
        fewer = weight.clone()
        fewer[:, missing] = 0
        assert not sums_agree(lambda x, w=fewer: linear_in_tiles(x, w, bias), weight, bias)

    def last_output_is_wrong(x: torch.Tensor) -> torch.Tensor:
        y = right(x)
        y[:, -1] = y[:, -2]
        return y

    def lone_row_differs(x: torch.Tensor) -> torch.Tensor:
        y = linear_in_tiles(x, weight, bias)
        return y.nextafter(torch.tensor(9e9)) if len(x) == 1 else y

    assert not sums_agree(last_output_is_wrong, weight, bias)
    assert not sums_agree(lone_row_differs, weight, bias), "its bits depend on the others"
    assert not sums_agree(lambda x: right(x) * torch.nan, weight, bias)


@on_bf16_cpu
def test_layers_with_tiles_multiply_all_rows_in_them(emulated: TileChecks) -> None:
    weight, bias, x = bf16(128, 96), bf16(128, seed=1), bf16(40, 96, seed=2)
    layer = PackedWeight(weight, bias, kernels="numba")
    assert layer.any_rows is not None
    assert layer.any_rows.in_tiles
    assert torch.equal(layer(x), linear_in_tiles(x, weight, bias).bfloat16())
    assert torch.equal(layer(x[:1]), layer(x)[:1])
    head = HeadWeight(bf16(97, 96), kernels="numba")
    assert torch.equal(head(x), linear_in_tiles(x, bf16(97, 96), None))
    assert emulated.failed == 0


@on_bf16_cpu
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_layers_without_a_panel_of_onednn_are_padded_for_tiles(
    emulated: TileChecks, biased: bool
) -> None:
    """oneDNN would multiply them without AMX."""
    weight, x = bf16(200, 96), bf16(40, 96, seed=2)
    bias = bf16(200, seed=1) if biased else None
    assert packs_padded(200, 96, torch.bfloat16, has_bias=biased)
    layer = PackedWeight(weight, bias, kernels="numba")
    assert torch.equal(layer(x), linear_in_tiles(x, weight, bias).bfloat16())
    planned = nbytes_of(200, 96, False, torch.bfloat16, "numba", None, has_bias=biased)
    assert layer.nbytes == planned == 208 * 96 * 2
    assert not padded_multiply(weight, bias)(x)[:, 200:].any()


@on_bf16_cpu
def test_layers_whose_tiles_sum_wrong_use_vectors(
    emulated: TileChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "sums_agree", lambda multiply, weight, bias: False)
    weight = bf16(128, 96)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
    ours = multiply_for(weight, reordered, None)
    assert ours
    assert not ours.in_tiles
    assert torch.equal(ours(bf16(5, 96)), PackedWeight(weight)(bf16(5, 96)))
    head = HeadWeight(weight, kernels="numba")
    assert isinstance(head._product, PackedMultiply)
    assert not head._product.in_tiles
    monkeypatch.setattr(linear, "cpu_has_amx", lambda: True)
    assert linear.tiles_note() == "its sums are wrong for 2 kinds of layers"


def test_tiles_without_amx_are_neither_compiled_nor_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run with ONEDNN_MAX_CPU_ISA set to less than AMX."""

    class NoKernels:
        def address(self, name: str, *shape: int) -> int:
            raise AssertionError(f"{name} is requested")

    linear.tiles_problem.cache_clear()
    monkeypatch.setattr(linear, "kernel_store", NoKernels)
    try:
        problem = linear.tiles_problem()
    finally:
        linear.tiles_problem.cache_clear()
    assert problem in ("the CPU has no AMX", "ONEDNN_MAX_CPU_ISA forbids it")
    assert linear.tiles_note() == (problem if HAS_AMX else None)


@on_bf16_cpu
def test_tiles_problem_with_wrong_sums_forbids_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "tiles_refused", lambda: None)
    monkeypatch.setattr(linear, "has_amx_bf16", lambda: True)
    monkeypatch.setattr(linear, "EMULATES_TILES", True)
    assert linear.tiles_problem.__wrapped__() is None
    monkeypatch.setattr(linear, "sums_agree", lambda multiply, weight, bias: False)
    assert linear.tiles_problem.__wrapped__() == "its sums are wrong"
    monkeypatch.setattr(linear, "has_amx_bf16", lambda: False)
    assert linear.tiles_problem.__wrapped__().startswith("it needs AMX")


def test_permission_comes_from_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without AMX refuses, and so does a container that forbids the call."""
    monkeypatch.setattr(permission, "cpu_has_amx", lambda: True)
    assert tiles_refused() == "ONEDNN_MAX_CPU_ISA forbids it"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    refused = tiles_refused()
    if HAS_AMX:
        assert refused is None
    else:
        assert refused is not None
        assert refused.startswith("Linux refuses the permission (")
    monkeypatch.setattr(permission.platform, "machine", lambda: "aarch64")
    assert tiles_refused() == "the CPU has no AMX"


ON_AMX = """
import torch
from engine.kernels.numba import linear
from tests.engine.kernels.numba.test_tiles import bf16, packed
from tests.support.tile_model import in_guide_order, linear_in_tiles, tdpbf16ps
print(linear.tiles_problem())
for width in (16, 32, 64):
    for rows, inputs in ((1, 64), (17, 130), (70, 96)):
        x, weight, bias = bf16(rows, inputs), bf16(128, inputs, seed=1), bf16(128, seed=2)
        found = linear.PackedMultiply(packed(weight, bias, width), None, wide=True)(x)
        orders = [linear_in_tiles(x, weight, bias, order) for order in (tdpbf16ps, in_guide_order)]
        print(*(torch.equal(found, order) for order in orders))
"""


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
def test_kernel_on_amx_equals_a_published_order() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ON_AMX],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "DEFAULT"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    problem, *lines = ran.stdout.split("\n")
    assert problem == "None", ran.stderr
    orders = [line.split() for line in lines if line]
    assert all(manual == "True" for manual, _ in orders) or all(
        guide == "True" for _, guide in orders
    ), ran.stdout
