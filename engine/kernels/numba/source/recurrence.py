"""Recurrent layers on a CPU: the gated delta rule, and Mamba-2's selective scan.

In both a state [rows, columns] of a head changes at each token by keep * state + key change^T. The
columns are independent of each other. A task is one head of one run. It computes a tile of columns
after the other, and in each the tokens one after another. A token therefore has the same bits in a
chunk and as a decode. The tiles of a head lie between each other in memory. If two threads shared
them, each would fetch the lines of the other: decodes of 8 streams took 2.2 times as long.

The delta rule needs what the state holds for a token's key, before the token changes it. The pass
over the tile for the token before looks that up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import RecurrenceCall
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.gates import exp, sigmoid, softplus
from engine.kernels.numba.source.intrinsics import array_at, on_stack, take, to_element, to_fp32
from engine.kernels.numba.source.padding import write_padding
from engine.kernels.numba.source.rowwise import scale_alone, square
from engine.kernels.numba.source.state_tile import WIDEST, advance
from engine.kernels.numba.source.sum_tiles import LANES

L2_EPS = 1e-6


class Room(NamedTuple):
    """Addresses of fp32 numbers on the stack."""

    state: int  # [rows, WIDEST]: the tile, if no slot gets it
    key: int  # [rows]
    next_key: int  # [rows]
    query: int  # [rows]
    change: int  # [WIDEST]
    held: int  # [WIDEST]: what the state holds for the next key
    out: int  # [WIDEST]


class Place(NamedTuple):
    """Where a tile of a state lies."""

    address: int
    stride: int  # bytes between rows


class Gates(NamedTuple):
    """A token's factors of one head."""

    keep: np.float32  # of the state
    share: np.float32  # of the change


@njit(inline="always")
def numbers_at(address, count):
    """Return the `count` fp32 numbers at this address."""
    return array_at(address, (count,), np.float32)


@njit(inline="always")
def integer_at(address, index):
    return array_at(address, (1,), np.int64)[index]


@njit(inline="always")
def number_at(address, index, item):
    """Return a number of an array of bf16, if an `item` has 2 bytes, or fp32."""
    if item == 2:
        return to_fp32(array_at(address, (1,), np.uint16)[index])
    return array_at(address, (1,), np.float32)[index]


# ---- tiles -----------------------------------------------------------------------------------


@njit(inline="always")
def tiles_of(columns):
    """Return the number of tiles of a head."""
    left = columns % WIDEST
    return columns // WIDEST + left // LANES + left % LANES


@njit(inline="always")
def columns_at(call, tile):
    """Return the first column and the width of a tile: the widest tiles come first."""
    wide = call.columns // WIDEST
    if tile < wide:
        return tile * WIDEST, WIDEST
    left = wide * WIDEST
    tile -= wide
    narrow = (call.columns - left) // LANES
    if tile < narrow:
        return left + LANES * tile, LANES
    return left + LANES * narrow + tile - narrow, 1


@njit(inline="always")
def slot_place(call, slot, head, left):
    """Return the place of the tile from column `left` on, in a slot."""
    stride = 4 * call.columns
    number = slot * call.heads + head
    return Place(call.states + stride * call.rows * number + 4 * left, stride)


@njit(inline="always")
def place_behind(call, token, head, left, room):
    """Return the place of the tile behind a token: the slot that gets it, or the stack."""
    slot = integer_at(call.writes, token)
    if slot:
        return slot_place(call, slot, head, left)
    return Place(room.state, 4 * WIDEST)


@njit(inline="always")
def tile_behind(call, number, tile, following):
    """Return the address of the tile that a thread computes after this one of task `number`."""
    tile += 1
    if tile == tiles_of(call.columns):
        if following >= call.runs * call.heads:
            tile -= 1  # none is left
        else:
            number = following
            tile = 0
    left, _ = columns_at(call, tile)
    slot = integer_at(call.reads, number // call.heads)
    return slot_place(call, slot, number % call.heads, left).address


# ---- inputs of a token -----------------------------------------------------------------------


@njit(inline="always")
def gates_of(call, token, head, corrects):
    bias = number_at(call.dt_bias, head, call.vector_bytes)
    step = number_at(call.step, token * call.step_stride + head, call.gate_bytes)
    rate = exp(number_at(call.a_log, head, call.vector_bytes))
    time = softplus(step + bias)
    keep = exp(-rate * time)
    if corrects:
        beta = number_at(call.beta, token * call.beta_stride + head, call.gate_bytes)
        return Gates(keep, sigmoid(beta))
    return Gates(keep, time)


@njit(inline="always")
def load(address, rows, factor, out, normalizes, kind):
    """Store a key or a query as fp32, times `factor`, and of length 1 if `normalizes`."""
    numbers = array_at(address, (rows,), kind)
    if normalizes:
        factor = factor / np.sqrt(square(numbers) + np.float32(L2_EPS))
    scale_alone(numbers, factor, numbers_at(out, rows))


@njit(inline="always")
def load_key(call, token, head, out, corrects, kind, item):
    begin = token * call.key_stride + head // call.shared * call.key_head
    load(call.key + item * begin, call.rows, np.float32(1), out, corrects, kind)


@njit(inline="always")
def load_query(call, token, head, out, corrects, kind, item):
    begin = token * call.query_stride + head // call.shared * call.query_head
    scale = np.float32(call.scale)
    load(call.query + item * begin, call.rows, scale, out, corrects, kind)


# ---- arithmetic ------------------------------------------------------------------------------


@njit(fastmath=EXACT, error_model="numpy")
def correct(values, held, gates, change):
    """Store share * (values - keep * held) in `change`."""
    for i in range(len(change)):
        change[i] = gates.share * (to_fp32(values[i]) - gates.keep * held[i])


@njit(fastmath=EXACT, error_model="numpy")
def write(sums, values, skip, out):
    """Store sums + skip * values in `out`, rounded to its type."""
    for i in range(len(out)):
        out[i] = to_element(sums[i] + skip * to_fp32(values[i]), out)


# ---- the kernel ------------------------------------------------------------------------------


@njit(inline="always")
def pass_over(call, old, new, key, query, next_key, ahead, keep, width, room):
    """Change the tile at `old` to the one at `new`. `state_tile.advance` describes the others."""
    advance(
        old.address,
        old.stride,
        new.address,
        new.stride,
        call.rows,
        key,
        room.change,
        query,
        room.out,
        next_key,
        room.held,
        ahead,
        keep,
        width,
    )


@njit(inline="always")
def look_up(call, token, head, old, width, room, kind, item):
    """Find what a run's first state holds for its first key, by a pass that changes nothing."""
    load_key(call, token, head, room.key, True, kind, item)
    none = Place(0, 0)
    pass_over(call, old, none, 0, 0, room.key, old.address, np.float32(1), width, room)


@njit(inline="always")
def compute_run(call, run, head, left, width, ahead, room, corrects, kind, item):
    """Compute the tokens of a run for a tile of columns. `ahead` is the address of the next."""
    first = integer_at(call.starts, run)
    end = integer_at(call.starts, run + 1)
    state = slot_place(call, integer_at(call.reads, run), head, left)
    key = room.key
    next_key = room.next_key
    skip = number_at(call.skip, head, call.vector_bytes) if call.skip else np.float32(0)
    if corrects and first < end:
        look_up(call, first, head, state, width, room, kind, item)
    for token in range(first, end):
        gates = gates_of(call, token, head, corrects)
        begin = token * call.value_stride + head * call.value_head + left
        values = array_at(call.value + item * begin, (width,), kind)
        load_query(call, token, head, room.query, corrects, kind, item)
        following = 0
        if not corrects:
            load_key(call, token, head, key, False, kind, item)
            scale_alone(values, gates.share, numbers_at(room.change, width))
        else:
            correct(values, numbers_at(room.held, width), gates, numbers_at(room.change, width))
            if token + 1 < end:
                load_key(call, token + 1, head, next_key, True, kind, item)
                following = next_key
        new = place_behind(call, token, head, left, room)
        next_tile = ahead if token + 1 == end else state.address
        pass_over(call, state, new, key, room.query, following, next_tile, gates.keep, width, room)
        state = new
        key, next_key = next_key, key
        place = (token * call.heads + head) * call.columns + left
        out = array_at(call.out + item * place, (width,), kind)
        write(numbers_at(room.out, width), values, skip, out)


def recurrence_kernel(corrects: bool, half: bool):
    """Return the kernel of the delta rule, which `corrects` what a state holds, or of the scan.

    Queries, keys and values are bf16 if `half`, else fp32.
    """
    kind = np.uint16 if half else np.float32
    item = 2 if half else 4

    def over_tiles(pointer):
        call = carray(pointer, 1)[0]
        rows = call.rows
        room = Room(
            on_stack(rows * WIDEST),
            on_stack(rows),
            on_stack(rows),
            on_stack(rows),
            on_stack(WIDEST),
            on_stack(WIDEST),
            on_stack(WIDEST),
        )
        tiles = tiles_of(call.columns)
        last = call.runs * call.heads
        following = take(call.counter)
        while True:
            number = following
            if number > last:
                return
            if number == last:
                write_padding(call, call.heads * call.columns, kind, item)
                return
            following = take(call.counter)
            run = number // call.heads
            head = number % call.heads
            for tile in range(tiles):
                left, width = columns_at(call, tile)
                ahead = tile_behind(call, number, tile, following)
                compute_run(call, run, head, left, width, ahead, room, corrects, kind, item)

    return over_tiles, RecurrenceCall
