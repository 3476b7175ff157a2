"""Linear layers on a CPU that multiplies bf16 (AVX512_BF16, or AMX).

oneDNN reads the weight for few rows below the memory bandwidth, and multiplies many rows no faster
than these kernels. They read oneDNN's own packed bytes, so there is no second copy of the weight.
With vectors, the sums are in oneDNN's order, so that a row has the same bits in both. With AMX all
rows go through tiles, so that a row has the same bits whichever rows are with it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from engine.device.facts import cpu_has_amx, uses_amx
from engine.device.openmp import in_threads, parallel
from engine.device.tiles import tiles_refused
from engine.kernels.numba.call import CACHE_LINE, LinearCall
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.cpu import has_amx_bf16, has_avx512_bf16
from engine.kernels.numba.lookup import panel_rows
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.prepared import PreparedRows, aligned
from engine.kernels.numba.tiles import sums_agree, tile_checks

# Of the kernel without tiles: oneDNN with AMX is faster above this number of rows.
MOST_ROWS_AMX = 4
ANY_ROWS = 2**31
FEW_OUTPUTS = 128
WIDTHS = (64, 32, 16)  # outputs per panel that oneDNN is known to use
PANEL = 16  # outputs per panel of weights that we pack
HEAD_PANEL, HEAD_SPLIT = 64, 256  # of a head: the panel that is fastest, and oneDNN's usual split
SPLITS = (256, 512, 2**30)  # pairs of inputs per partial sum that oneDNN is known to use
SHARES = 4  # a thread takes its panels in about this number of parts
PROBES = 128  # rows whose results are compared with oneDNN's
IN_TILES = None  # in place of a split: the order of sums in tiles
EMULATES_TILES = False  # tests set it: vector instructions instead of AMX's


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A linear layer whose weight is packed in panels of `width` outputs, by oneDNN or by us."""

    weight: torch.Tensor  # [out, in]
    packed: torch.Tensor  # [out, in], in oneDNN's order, or a plain tensor in the order of panels
    bias: torch.Tensor | None  # [out]
    width: int

    @property
    def address(self) -> int:
        is_opaque = self.packed.is_mkldnn
        return torch.ops.mkldnn.data_ptr(self.packed) if is_opaque else self.packed.data_ptr()

    @property
    def shape(self) -> LinearShape:
        outputs, inputs = self.weight.shape
        return LinearShape(outputs, inputs, self.width, self.bias is not None)


class LinearShape(NamedTuple):
    """The properties of a packed layer that oneDNN's order of summation depends on."""

    outputs: int
    inputs: int
    width: int
    has_bias: bool


class PackedMultiply:
    """y = x W^T + b for up to `most` rows of x, summed in parts of `split` pairs of inputs.

    y is bf16, or fp32 if `wide`. With `IN_TILES` for a split, AMX multiplies any rows.
    """

    def __init__(self, layer: PackedLinear, split: int | None, *, wide: bool = False) -> None:
        outputs, inputs, width, has_bias = layer.shape
        panels = outputs // width
        shares = SHARES * torch.get_num_threads()
        # The call holds only their addresses.
        self._packed = layer.packed
        self._bias = layer.bias
        self._width = width
        self.outputs = outputs
        self._dtype = torch.float32 if wide else torch.bfloat16
        in_tiles = split is IN_TILES
        self.in_tiles = in_tiles
        name, *form = kernel_of(width, has_bias=has_bias, wide=wide, in_tiles=in_tiles)
        self.kernel = kernel_store().address(str(name), *map(int, form))
        self.call = LinearCall(
            panels=panels,
            at_once=max(1, panels // shares),
            threads=torch.get_num_threads(),
            weight=layer.address,
            bias=0 if layer.bias is None else layer.bias.data_ptr(),
            pairs=inputs // 2,
            split=split or 0,
            out_bytes=self._dtype.itemsize * outputs,
        )
        amx = uses_amx(layer.packed.device, layer.packed.dtype)
        is_limited = amx and not in_tiles and layer.packed.is_mkldnn  # else oneDNN cannot help
        self.most = MOST_ROWS_AMX if is_limited else ANY_ROWS

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, outputs] for x [rows, inputs]."""
        rows = x.shape[0]
        assert rows <= self.most
        out = self.empty(rows)
        call = self.call
        for name, (value, _) in self.prepared(x).fields.items():
            setattr(call, name, value)
        call.rows = rows
        call.out = out.data_ptr()
        in_threads(self.kernel, call)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [T, inputs] of the weight, which was packed here, for ids [T]."""
        return panel_rows(ids, self._packed, 2 * self.call.pairs, self._width)

    def prepared(self, x: torch.Tensor) -> PreparedRows:
        """Return x [rows, inputs] as the kernel reads it."""
        assert x.stride(1) == 1
        return PreparedRows({"x": x}, {"x_bytes": 2 * x.stride(0)})

    def empty(self, rows: int) -> torch.Tensor:
        """Return room for the products [rows, outputs]."""
        return torch.empty(rows, self.outputs, dtype=self._dtype)


def kernel_of(width: int, *, has_bias: bool, wide: bool, in_tiles: bool) -> Kernel:
    """Return the kernel for panels of `width` outputs."""
    if in_tiles:
        return "linear_tiles.tiles_kernel", width, has_bias, wide, EMULATES_TILES
    return "linear.rows_kernel", width, has_bias, wide


def narrow(weight: torch.Tensor) -> PackedMultiply:
    """Return our kernel for a weight [out, in], which is packed here.

    The outputs are a multiple of `PANEL`, and the inputs even. All such weights have one kernel.
    """
    split = IN_TILES if tiles_problem() is None else max(SPLITS)
    return PackedMultiply(pack_panels(weight, PANEL), split)


def packs_padded(outputs: int, inputs: int, dtype: torch.dtype, *, has_bias: bool) -> bool:
    """Return whether `padded_multiply` takes a weight of this size: oneDNN has no panel for it.

    In tiles it takes all of them, because oneDNN then goes without AMX (see `forbid_amx`).
    """
    if outputs % max(WIDTHS) == 0 or inputs % 2 or not has_kernel(dtype):
        return False
    if tiles_problem() is None:
        return True
    is_few = outputs < FEW_OUTPUTS and not has_bias
    return is_few and not uses_amx(torch.device("cpu"), dtype)


def padded_multiply(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMultiply:
    """Return our kernel for a weight [out, in], which is packed here and padded with zeros.

    The products have columns of zeros behind the others.
    """
    missing = -len(weight) % PANEL
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    if bias is None:
        return narrow(padded)
    bias = torch.nn.functional.pad(bias, (0, missing))
    layer = replace(pack_panels(padded, PANEL), bias=bias)
    return _in_tiles(layer) or PackedMultiply(layer, max(SPLITS))


def head_multiply(weight: torch.Tensor) -> PackedMultiply:
    """Return our kernel with fp32 products for a head [out, in], which is packed here.

    Rows of zeros fill the last panel, and their products come last. See `can_multiply_head`.
    """
    missing = -len(weight) % HEAD_PANEL
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    layer = pack_panels(padded, HEAD_PANEL)
    return _in_tiles(layer, wide=True) or PackedMultiply(layer, HEAD_SPLIT, wide=True)


def can_multiply_head(inputs: int, dtype: torch.dtype) -> bool:
    """Return whether `head_multiply` can run here for a head with this number of inputs."""
    return inputs % 2 == 0 and has_kernel(dtype)


def pack_panels(weight: torch.Tensor, width: int) -> PackedLinear:
    """Return a weight [out, in] packed in panels of `width` outputs, which divide its outputs."""
    return PackedLinear(weight, aligned(_in_panels(weight, width)), None, width)


# ---- tiles -----------------------------------------------------------------------------------


@cache
def tiles_problem() -> str | None:
    """Return why no kernel of ours may multiply in tiles in this process; None if they may.

    The first call decides. It must come before `forbid_amx`, which limits oneDNN but not us.
    """
    refused = tiles_refused()
    if refused is not None:
        return refused
    if not has_amx_bf16() or not has_kernel(torch.bfloat16):
        return "it needs AMX and AVX512_BF16 as compiler targets, and torch with OpenMP threads"
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * max(WIDTHS), 80, generator=generator).bfloat16()
    for width in (max(WIDTHS), PANEL):  # of most layers, and of those that `narrow` packs
        layer = pack_panels(weight, width)
        if not sums_agree(PackedMultiply(layer, IN_TILES), weight, None):
            return "its sums are wrong"
    return None


def tiles_note() -> str | None:
    """Return a note for the user if the CPU has AMX and our kernels do not use it everywhere."""
    problem = tiles_problem()
    if problem is not None:
        return problem if cpu_has_amx() else None
    failed = tile_checks().failed
    return f"its sums are wrong for {failed} kinds of layers" if failed else None


def _in_tiles(layer: PackedLinear, *, wide: bool = False) -> PackedMultiply | None:
    """Return the kernel that multiplies in tiles, or None if it may not or gives wrong sums."""
    if tiles_problem() is not None:
        return None
    multiply = PackedMultiply(layer, IN_TILES, wide=wide)
    passes = tile_checks().passes(
        (layer.shape, wide), lambda: sums_agree(multiply, layer.weight, layer.bias)
    )
    return multiply if passes else None


# ---- recognizing oneDNN's format and order ---------------------------------------------------


def multiply_for(
    weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> PackedMultiply | None:
    """Return our kernel for `packed`, which is `weight` [out, in] packed by oneDNN.

    It takes any number of rows, unless the CPU has AMX and our kernel multiplies without tiles.

    Returns None if no kernel gives oneDNN's results bit by bit. In tiles they only have to be close
    to the exact ones, and so with oneDNN's AMX, whose own bits depend on the number of rows (see
    docs/cpu.md).
    """
    if not has_kernel(weight.dtype) or not _is_plain(weight, packed):
        return None
    width = _panel_width(weight, packed)
    if width is None:
        return None
    layer = PackedLinear(weight, packed, bias, width)
    in_tiles = _in_tiles(layer)
    if in_tiles is not None:
        return in_tiles
    split = known_splits().find(layer)
    return None if split is None else PackedMultiply(layer, split)


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of torch can run the kernel for weights of this dtype."""
    if dtype != torch.bfloat16 or not has_avx512_bf16():
        return False
    return parallel() is not None and hasattr(torch.ops.mkldnn, "data_ptr")


def _is_plain(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether `packed` is aligned and has the size of `weight`: oneDNN has added no padding."""
    size = torch.ops.mkldnn._nbytes(packed)
    address = torch.ops.mkldnn.data_ptr(packed)
    return size == weight.nbytes and address % CACHE_LINE == 0


def _panel_width(weight: torch.Tensor, packed: torch.Tensor) -> int | None:
    """Return the outputs per panel, or None unless exactly one known width explains the bytes.

    A panel stores the first pair of inputs for all its outputs, then the second pair, and so on.
    """
    most = max(WIDTHS)
    outputs, inputs = weight.shape
    if inputs % 2 or outputs % most:
        return None
    first = weight[:most].view(torch.int16)
    address = torch.ops.mkldnn.data_ptr(packed)
    memory = (ctypes.c_int16 * first.numel()).from_address(address)
    found = torch.frombuffer(memory, dtype=torch.int16)
    widths = [width for width in WIDTHS if torch.equal(found, _in_panels(first, width))]
    return widths[0] if len(widths) == 1 else None


def _in_panels(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return the elements of `rows` [outputs, inputs] in the order of panels of `width` outputs."""
    outputs, inputs = rows.shape
    panels = rows.view(outputs // width, width, inputs // 2, 2)  # [panels, outputs, pairs, 2]
    return panels.transpose(1, 2).flatten()


class KnownSplits:
    """The split that oneDNN uses for each shape, found by comparing results with it once."""

    def __init__(self) -> None:
        self._found: dict[LinearShape, int | None] = {}

    def find(self, layer: PackedLinear) -> int | None:
        """Return the split, or None if no known split gives oneDNN's results."""
        shape = layer.shape
        if shape not in self._found:
            agreeing = (split for split in SPLITS if _agrees(layer, split))
            self._found[shape] = next(agreeing, None)
        return self._found[shape]


@cache
def known_splits() -> KnownSplits:
    """Return the splits that all layers of this process share."""
    return KnownSplits()


def _agrees(layer: PackedLinear, split: int) -> bool:
    weight = layer.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, weight.shape[1], generator=generator).to(weight.dtype)
    right = torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")
    ours = PackedMultiply(layer, split)
    found = torch.cat([ours(rows) for rows in x.split(ours.most)])
    if not uses_amx(weight.device, weight.dtype):
        return torch.equal(found, right)
    largest = right.abs().max().item()
    return torch.allclose(found, right, rtol=2**-6, atol=2**-6 * largest)
