"""Products of rows with a panel of a bf16 weight in tiles (AMX).

Each product is a sum over tiles of 32 inputs, in order. The last tile has zeros behind the inputs.
So a row has the same bits whichever block of rows it is in.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import CACHE_LINE
from engine.kernels.numba.source.llvm import (
    BF16,
    FP32,
    INT16,
    INT32,
    INT64,
    declare,
    load,
    offset,
    prefetch,
    store,
    widen_vector,
)
from engine.kernels.numba.source.multiply_panel import PREFETCH
from engine.kernels.numba.source.tiles import LANES, ROWS, SUMS, VOID, AmxTiles, EmulatedTiles

PAIRS = 16  # pairs of inputs in a tile
ROUNDED = ir.VectorType(BF16, LANES)
BIAS = ir.VectorType(INT16, LANES)
MOST_SUMS = 4  # tiles of sums; four more hold rows and weights


@intrinsic(prefer_literal=True)
def multiply_tiles(
    typing,
    weight,
    bias,
    pairs,
    x,
    x_bytes,
    out,
    out_bytes,
    blocks,
    last_rows,
    row_tiles,
    width,
    biased,
    wide,
    emulated,
):
    """out[r, :outputs] = x[r] times outputs of a panel [pairs, width, 2], plus their bias.

    `outputs` is that of `outputs_together`, and `weight` the address of the first one's weights. A
    block has `row_tiles` tiles of rows, 1 or 2. The last one has `last_rows` rows, 1 to 16. `out`
    is fp32 if `wide`, else bf16. With `emulated`, no AMX instruction is used.
    """
    operands = weight, bias, pairs, x, x_bytes, out, out_bytes, blocks, last_rows
    flags = row_tiles, width, biased, wide, emulated
    form = _Form(*(flag.literal_value for flag in flags))

    def code(context, builder, signature, values):
        builder.call(_function(builder.module, form), values[: len(operands)])
        return context.get_dummy_value()

    return types.void(*operands, *flags), code


def outputs_together(row_tiles, width):
    """Return the outputs that are summed together: as many as there are tiles for."""
    return min(MOST_SUMS // row_tiles * LANES, width)


class _Form(NamedTuple):
    """The properties that distinguish the functions."""

    row_tiles: int
    width: int
    biased: bool
    wide: bool
    emulated: bool

    @property
    def columns(self):
        """Tiles of outputs that are summed together."""
        return outputs_together(self.row_tiles, self.width) // LANES

    @property
    def pair_bytes(self):
        """Bytes of the weights of a pair of inputs, in a panel."""
        return CACHE_LINE // LANES * self.width


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs."""

    weight: ir.Value
    bias: ir.Value
    pairs: ir.Value
    x: ir.Value
    x_bytes: ir.Value
    out: ir.Value
    out_bytes: ir.Value
    blocks: ir.Value
    last_rows: ir.Value


def _function(module, form):
    """Return the function of this form, written into the module if it is not there.

    It is never inlined, because the tile registers are configured once per function.
    """
    name = "multiply_tiles_" + "_".join(map(str, map(int, form)))
    known = module.globals.get(name)
    if known is not None:
        return known
    kind = ir.FunctionType(VOID, [INT64] * len(_Operands._fields))
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    for attribute in ("noinline", "nounwind", "optsize"):  # unrolled loops would need more tiles
        function.attributes.add(attribute)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _Blocks(builder, _Operands(*function.args), form).multiply()
    builder.ret_void()
    return function


class _Blocks:
    """Code generator of a function that multiplies blocks of rows with a panel."""

    def __init__(self, builder, operands, form):
        self._builder = builder
        self._operands = operands
        self._form = form
        self._tiles = (EmulatedTiles if form.emulated else AmxTiles)(builder)
        self._columns = range(form.columns)
        full, last = INT16(ROWS), builder.trunc(operands.last_rows, INT16)
        self._rows = [full] * (form.row_tiles - 1) + [last]
        self._num_rows = offset(builder, operands.last_rows, ROWS * (form.row_tiles - 1))
        self._steps = builder.lshr(operands.pairs, INT64(4))  # of PAIRS pairs
        self._left = builder.and_(operands.pairs, INT64(PAIRS - 1))
        self._x_room = self._room(ROWS * form.row_tiles)
        self._weight_room = self._room(PAIRS * form.columns)
        self._sums_room = self._room(ROWS * form.row_tiles * form.columns)

    def _room(self, lines):
        """Return the address of some cache lines on the stack."""
        room = self._builder.alloca(SUMS, size=INT64(lines))
        room.align = CACHE_LINE
        return self._builder.ptrtoint(room, INT64)

    @property
    def _room_bytes(self):
        """Bytes between rows of the rooms for weights and sums."""
        return INT64(CACHE_LINE * self._form.columns)

    def multiply(self):
        builder, operands = self._builder, self._operands
        block_rows = INT64(ROWS * self._form.row_tiles)
        bias = self._load_bias()
        self._copy_last_weights()
        with cgutils.for_range(builder, operands.blocks) as block:
            first = builder.mul(block.index, block_rows)
            x = builder.add(operands.x, builder.mul(first, operands.x_bytes))
            out = builder.add(operands.out, builder.mul(first, operands.out_bytes))
            self._store_sums(self._add_last(x, self._add_whole(x)))
            self._write(out, bias)

    # ---- sums --------------------------------------------------------------------------------

    def _add_whole(self, x):
        """Return tiles with the sums over all whole tiles of inputs."""
        builder = self._builder
        zeros = [self._tiles.zero(rows) for rows in self._rows for _ in self._columns]

        def add(step, sums):
            weight = self._weight_of(step)
            if self._form.row_tiles == 1:
                self._prefetch(weight)
            place = builder.add(x, builder.mul(step, INT64(CACHE_LINE)))
            pair_bytes = INT64(self._form.pair_bytes)
            return self._add_step(sums, place, self._operands.x_bytes, weight, pair_bytes)

        return self._loop(self._steps, zeros, add)

    def _weight_of(self, step):
        """Return the address of the weights of a step's inputs."""
        distance = self._builder.mul(step, INT64(PAIRS * self._form.pair_bytes))
        return self._builder.add(self._operands.weight, distance)

    def _loop(self, count, values, body):
        """Return the values after `count` calls of `body(index, values)`, which returns new ones.

        Tiles cannot be stored in variables, so that the loop passes them on.
        """
        builder = self._builder
        before = builder.block
        head, inside, end = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(INT64)
        passed = [builder.phi(value.type) for value in values]
        builder.cbranch(builder.icmp_unsigned("<", index, count), inside, end)
        builder.position_at_end(inside)
        new = body(index, passed)
        for phi, first, later in zip(
            [index, *passed],
            [INT64(0), *values],
            [builder.add(index, INT64(1)), *new],
            strict=True,
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(later, builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        return passed

    def _add_step(self, sums, x, x_bytes, weight, weight_bytes):
        """Return the sums plus the products of one tile of inputs."""
        builder, tiles = self._builder, self._tiles
        down = builder.mul(x_bytes, INT64(ROWS))
        places = [x, builder.add(x, down)][: self._form.row_tiles]
        inputs = [
            tiles.load(rows, place, x_bytes) for rows, place in zip(self._rows, places, strict=True)
        ]
        new = list(sums)
        for column in self._columns:
            place = offset(builder, weight, CACHE_LINE * column)
            factors = tiles.load(INT16(PAIRS), place, weight_bytes)
            for row, (rows, own) in enumerate(zip(self._rows, inputs, strict=True)):
                index = row * len(self._columns) + column
                new[index] = tiles.add_products(rows, new[index], own, factors)
        return new

    def _prefetch(self, weight):
        """Read the weights of a later step ahead: a few rows wait for nothing else."""
        for pair in range(PAIRS):
            for column in self._columns:
                distance = PREFETCH + pair * self._form.pair_bytes + CACHE_LINE * column
                prefetch(self._builder, offset(self._builder, weight, distance), locality=2)

    # ---- the last inputs, which fill a part of a tile ----------------------------------------

    def _copy_last_weights(self):
        """Copy the last weights, and let zeros fill the tile."""
        builder = self._builder
        source = self._weight_of(self._steps)
        with cgutils.for_range(builder, self._left) as pair:
            begin = builder.add(source, builder.mul(pair.index, INT64(self._form.pair_bytes)))
            for column in self._columns:
                place = offset(builder, begin, CACHE_LINE * column)
                self._store_weights(pair.index, column, load(builder, place, SUMS, CACHE_LINE))
        missing = builder.sub(INT64(PAIRS), self._left)
        with cgutils.for_range(builder, missing) as pair:
            for column in self._columns:
                row = builder.add(self._left, pair.index)
                self._store_weights(row, column, ir.Constant(SUMS, None))

    def _store_weights(self, pair, column, vector):
        builder = self._builder
        begin = builder.add(self._weight_room, builder.mul(pair, self._room_bytes))
        store(builder, vector, offset(builder, begin, CACHE_LINE * column), align=CACHE_LINE)

    def _add_last(self, x, sums):
        """Return the sums plus the products of the last inputs, if some are left."""
        builder = self._builder
        is_left = builder.icmp_unsigned(">", self._left, INT64(0))

        def add(_, sums):
            self._copy_last_inputs(x)
            line = INT64(CACHE_LINE)
            return self._add_step(sums, self._x_room, line, self._weight_room, self._room_bytes)

        return self._loop(builder.zext(is_left, INT64), sums, add)

    def _copy_last_inputs(self, x):
        """Copy the last inputs of each row, and let zeros fill the tile."""
        builder = self._builder
        source = builder.add(x, builder.mul(self._steps, INT64(CACHE_LINE)))
        with cgutils.for_range(builder, self._num_rows) as row:
            room = builder.add(self._x_room, builder.mul(row.index, INT64(CACHE_LINE)))
            store(builder, ir.Constant(SUMS, None), room, align=CACHE_LINE)
            begin = builder.add(source, builder.mul(row.index, self._operands.x_bytes))
            with cgutils.for_range(builder, self._left) as pair:
                distance = builder.mul(pair.index, INT64(4))
                word = load(builder, builder.add(begin, distance), INT32, align=2)
                store(builder, word, builder.add(room, distance), align=4)

    # ---- results -----------------------------------------------------------------------------

    def _load_bias(self):
        """Return a vector of fp32 for each tile of outputs, or none."""
        if not self._form.biased:
            return []
        builder = self._builder
        begin = self._operands.bias
        vectors = []
        for column in self._columns:
            bits = load(builder, offset(builder, begin, 2 * LANES * column), BIAS, align=2)
            vectors.append(widen_vector(builder, bits, LANES))
        return vectors

    def _store_sums(self, sums):
        for index, tile in enumerate(sums):
            row, column = divmod(index, len(self._columns))
            distance = CACHE_LINE * (row * ROWS * len(self._columns) + column)
            place = offset(self._builder, self._sums_room, distance)
            self._tiles.store(self._rows[row], place, self._room_bytes, tile)

    def _write(self, out, bias):
        """Write the sums of each row, plus the bias."""
        builder = self._builder
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        item = FP32 if self._form.wide else BF16
        with cgutils.for_range(builder, self._num_rows) as row:
            source = builder.add(self._sums_room, builder.mul(row.index, self._room_bytes))
            begin = builder.add(out, builder.mul(row.index, self._operands.out_bytes))
            for column in self._columns:
                total = load(builder, offset(builder, source, CACHE_LINE * column), SUMS, 64)
                if bias:
                    total = builder.fadd(total, bias[column])
                if item is BF16:
                    total = builder.call(declare(builder, name, ROUNDED, [SUMS]), [total])
                size = 4 if item is FP32 else 2
                place = offset(builder, begin, size * LANES * column)
                store(builder, total, place, align=size)
