"""The tiles of AMX, the matrix unit of some CPUs: 16 rows of 64 bytes in a register.

`AmxTiles` writes AMX's instructions. `EmulatedTiles` writes vector instructions that follow Intel's
pseudo-code, so that a CPU without AMX runs everything around the tiles.

LLVM configures the registers of a function once, and gives each a fixed number of rows. A function
may therefore use eight tiles at most, counted by number of rows.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from engine.kernels.numba.call import CACHE_LINE
from engine.kernels.numba.source.llvm import (
    FP32,
    INT16,
    INT32,
    INT64,
    declare,
    load,
    offset,
    spread,
    store,
)

ROWS = 16  # of a tile
LANES = 16  # fp32 sums, or pairs of bf16, in a row of a tile
WORDS = ir.VectorType(INT32, LANES)
SUMS = ir.VectorType(FP32, LANES)
ROW_BYTES = INT16(CACHE_LINE)
ADDRESS = ir.IntType(8).as_pointer()
VOID = ir.VoidType()


class _Tile(ir.Type):
    """LLVM's type of a tile, for which llvmlite has no type."""

    def _to_string(self):
        return "x86_amx"


TILE = _Tile()  # one instance, because llvmlite compares types


class AmxTiles:
    """Tiles in registers. `rows` is an i16, and may be known only when the kernel runs."""

    kind = TILE

    def __init__(self, builder):
        self._builder = builder

    def zero(self, rows):
        return self._call("tilezero", TILE, [rows, ROW_BYTES])

    def load(self, rows, address, stride):
        """Return the tile whose rows begin at `address`, `stride` bytes apart."""
        place = self._builder.inttoptr(address, ADDRESS)
        return self._call("tileloadd64", TILE, [rows, ROW_BYTES, place, stride])

    def add_products(self, rows, sums, a, b):
        """Return the sums [rows, 16] plus a [rows, 16 pairs] times b [16 pairs, 16]."""
        return self._call("tdpbf16ps", TILE, [rows, ROW_BYTES, ROW_BYTES, sums, a, b])

    def store(self, rows, address, stride, tile):
        place = self._builder.inttoptr(address, ADDRESS)
        self._call("tilestored64", VOID, [rows, ROW_BYTES, place, stride, tile])

    def _call(self, name, result, arguments):
        kinds = [argument.type for argument in arguments]
        name = f"llvm.x86.{name}.internal"
        return self._builder.call(declare(self._builder, name, result, kinds), arguments)


class EmulatedTiles:
    """Tiles on the stack. A tile's value is its address, and `add_products` changes the sums.

    Numbers below fp32's normal range are kept, where AMX takes them for zeros.
    """

    kind = INT64

    def __init__(self, builder):
        self._builder = builder
        self._fma = declare(builder, "llvm.fma.v16f32", SUMS, [SUMS, SUMS, SUMS])

    def zero(self, rows):
        tile = self._new_tile()
        for row in range(ROWS):
            self._store_row(tile, INT64(row), ir.Constant(WORDS, None))
        return tile

    def load(self, rows, address, stride):
        builder, tile = self._builder, self.zero(rows)
        with cgutils.for_range(builder, builder.zext(rows, INT64)) as loop:
            source = builder.add(address, builder.mul(loop.index, stride))
            self._store_row(tile, loop.index, load(builder, source, WORDS, align=1))
        return tile

    def add_products(self, rows, sums, a, b):
        builder = self._builder
        with cgutils.for_range(builder, builder.zext(rows, INT64)) as loop:
            even, odd = self._row_products(self._row_address(a, loop.index), b)
            old = builder.bitcast(self._load_row(sums, loop.index), SUMS)
            new = builder.fadd(old, builder.fadd(even, odd))
            self._store_row(sums, loop.index, builder.bitcast(new, WORDS))
        return sums

    def store(self, rows, address, stride, tile):
        builder = self._builder
        with cgutils.for_range(builder, builder.zext(rows, INT64)) as loop:
            place = builder.add(address, builder.mul(loop.index, stride))
            store(builder, self._load_row(tile, loop.index), place, align=1)

    def _row_products(self, a_row, b):
        """Return a row's sums of the products of even inputs, and of odd ones, from zero on."""
        builder = self._builder
        even = odd = ir.Constant(SUMS, None)
        for pair in range(LANES):
            word = load(builder, offset(builder, a_row, 4 * pair), INT32, align=4)
            a_even, a_odd = self._halves(spread(builder, word, LANES))
            b_even, b_odd = self._halves(self._load_row(b, INT64(pair)))
            even = builder.call(self._fma, [a_even, b_even, even])
            odd = builder.call(self._fma, [a_odd, b_odd, odd])
        return even, odd

    def _halves(self, words):
        """Return the low and the high bf16 of each word as fp32."""
        builder = self._builder
        low = builder.shl(words, ir.Constant(WORDS, [16] * LANES))
        high = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
        return builder.bitcast(low, SUMS), builder.bitcast(high, SUMS)

    def _new_tile(self):
        with self._builder.goto_entry_block():
            room = self._builder.alloca(WORDS, size=INT64(ROWS))
            room.align = CACHE_LINE
            return self._builder.ptrtoint(room, INT64)

    def _row_address(self, tile, row):
        return self._builder.add(tile, self._builder.mul(row, INT64(CACHE_LINE)))

    def _load_row(self, tile, row):
        return load(self._builder, self._row_address(tile, row), WORDS, align=CACHE_LINE)

    def _store_row(self, tile, row, words):
        store(self._builder, words, self._row_address(tile, row), align=CACHE_LINE)
