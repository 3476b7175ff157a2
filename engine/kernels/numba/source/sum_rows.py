"""Sums of weighted rows of a matrix, in tiles that the registers hold (sum_tiles.py)."""

from __future__ import annotations

from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.numba.call import WEIGHT_BYTES
from engine.kernels.numba.source.llvm import INT64
from engine.kernels.numba.source.sum_tiles import LANES, MOST_COLUMNS, MOST_ROWS, tiles_of


@njit(inline="always")
def tile_height(rows):
    """Return the height of tiles that divide the rows about equally."""
    tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
    return (rows + tiles - 1) // tiles


@njit(inline="always")
def sum_rows(
    out,
    width,
    keep,
    weights,
    stride,
    parts,
    ahead,
    vectors,
    part_rows,
    row_bytes,
    count,
    factor,
    rows,
    height,
    columns,
    form,
):
    """out[r] = keep[r] * out[r] + weights[r, 0] * matrix[0] + weights[r, 1] * matrix[1] + ...

    The terms are added in this order. `Operands` describes the arguments up to `factor`. If `keep`
    is 0, the old `out` is ignored. `rows` rows and the first `columns` columns are computed, in
    tiles of at most `height` rows. `form`, a literal, is that of the matrix: AS_FP32, AS_BF16,
    AS_INT8, AS_E4M3 or IN_PAIRS.

    The matrix lies in parts of `part_rows` rows each, and each part in vectors of LANES columns.

    IN_PAIRS, two terms are multiplied and added by one instruction (AVX512_BF16). The pairs are
    those of terms 2 i and 2 i + 1, so a term of weight 0 at the end changes no sum.
    """
    left = 0
    while left < columns:
        tile_columns = min(MOST_COLUMNS, columns - left)
        if tile_columns > LANES:
            tile_columns -= tile_columns % LANES
        top = 0
        while top < rows:
            add_tile(
                out + 4 * (top * width + left),
                width,
                keep + 4 * top if keep else 0,
                weights + WEIGHT_BYTES[form] * top * stride,
                stride,
                parts + 8 * (left // LANES),
                ahead + 8 * (left // LANES),
                vectors,
                part_rows,
                row_bytes,
                count,
                factor,
                min(height, rows - top),
                tile_columns,
                form,
            )
            top += height
        left += tile_columns


@intrinsic(prefer_literal=True)
def add_tile(
    typing,
    out,
    width,
    keep,
    weights,
    stride,
    parts,
    ahead,
    vectors,
    part_rows,
    row_bytes,
    count,
    factor,
    rows,
    columns,
    form,
):
    """Compute the sums of up to MOST_ROWS rows and MOST_COLUMNS columns, as `sum_rows` does.

    `columns` is NARROWEST or a multiple of LANES.
    """

    def code(context, builder, signature, values):
        *operands, rows, columns, _ = values
        rows_first = builder.mul(rows, INT64(MOST_COLUMNS))
        size = builder.add(rows_first, columns)
        tiles = tiles_of(builder.module, form.literal_value)
        builder.call(tiles, [*operands, size])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11, types.float32, *[types.int64] * 2, form), code
