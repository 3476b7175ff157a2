"""Paged attention on a CPU, compiled by Numba: keys and values are read where they lie, once.

A query's softmax goes block by block (online softmax, arXiv 1805.02867) and its sums key by key,
whoever else is in the step. So a token has the same bits alone and in a batch, in a chunk and as a
decode.

Sums are written out as instructions, not left to LLVM to vectorize: they stay in registers, and
their order is the same on every path through a kernel.

Keys lie transposed in their block, [head_dim, block_size]: a query's scores are a sum over head_dim
as its output is one over keys, weights times the rows of a matrix, and one function does both.

All that machine code is made from stands in this file, for Numba keeps it until this file changes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic, overload

from engine.attention.numba_call import LOG2_E, RECORD

SIGNATURE = types.void(types.CPointer(RECORD))
EXACT = {"contract"}  # a product and a sum may be rounded as one, and nothing is reordered
TILE = 8  # tokens of a chunk that read a block while it is in the nearest cache
# A tile of sums in registers: AVX-512 has 32 registers of 16 numbers, older CPUs 16 of 8.
AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))
LANES, ROWS, COLUMNS = (16, 4, 4) if AVX512 else (8, 4, 2)
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FP32 = ir.FloatType()
CACHE_LINE = 64


# ---- what Numba's Python has no words for ----------------------------------------------------


@intrinsic
def at(typing, address):
    """The address as a pointer."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def take(typing, counter):
    """The number at this address; whoever asks next, in whichever thread, gets the next one."""

    def code(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "monotonic")

    return types.int64(types.int64), code


@intrinsic(prefer_literal=True)
def highest(typing, numbers, count):
    """The highest of `count` fp32 numbers at this address. A NaN among them may be passed over."""
    vector = ir.VectorType(FP32, count.literal_value)

    def code(context, builder, signature, arguments):
        name = f"llvm.vector.reduce.fmax.v{vector.count}f32"
        reduce = _instruction(builder, name, FP32, [vector])
        read = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=4)
        return builder.call(reduce, [read], fastmath=("nnan",))

    return types.float32(numbers, count), code


@intrinsic(prefer_literal=True)
def sum_rows(typing, out, keep, weights, stride, matrix, ahead, count, rows, width, half):
    """out[r] = keep[r] * out[r] + weights[r, 0] * matrix[0] + weights[r, 1] * matrix[1] + ...

    In this order. Addresses of out [rows, width], keep [rows] and weights [rows, stride] in fp32,
    and of the matrix [count, width], bf16 where `half`. A literal 0 for `keep` keeps nothing.
    Meanwhile `count` rows at the address `ahead` are fetched from memory.
    """
    shape = rows.literal_value, width.literal_value, half.literal_value
    arguments = out, keep, weights, stride, matrix, ahead, count, rows, width, half

    def code(context, builder, signature, values):
        sums = _Sums(builder, values, *shape, fresh=isinstance(keep, types.IntegerLiteral))
        for top in range(0, shape[0], ROWS):
            for left in range(0, shape[1], COLUMNS * sums.lanes):
                sums.tile(top, left)
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Sums:
    """The code of `sum_rows` for one shape."""

    def __init__(self, builder, values, rows, width, half, *, fresh):
        self._out, self._keep, self._weights, self._stride, self._matrix = values[:5]
        self._ahead, self._count = values[5:7]
        self._builder, self._fresh, self._half = builder, fresh, half
        self._rows, self._width = rows, width
        self.lanes = LANES if width % LANES == 0 else 8
        self._vector = ir.VectorType(FP32, self.lanes)
        fma = f"llvm.fma.v{self.lanes}f32"
        self._fma = _instruction(builder, fma, self._vector, [self._vector] * 3)

    def tile(self, top, left):
        """The sums of a few rows and columns, over the whole matrix."""
        b = self._builder
        rows = [INT64(r) for r in range(top, min(self._rows, top + ROWS))]
        end = min(self._width, left + COLUMNS * self.lanes)
        columns = [INT64(c) for c in range(left, end, self.lanes)]
        tile = [(r, c) for r in rows for c in columns]
        places = [self._place(self._out, FP32, r, self._width, c, self._vector) for r, c in tile]
        starts = [self._start(r, place) for (r, _), place in zip(tile, places, strict=True)]
        sums = [cgutils.alloca_once_value(b, start) for start in starts]
        with cgutils.for_range(b, self._count) as loop:
            if top == left == 0:
                self._prefetch(loop.index)
            matrix = {c: self._matrix_row(loop.index, c) for c in columns}
            weights = {r: self._spread(self._weights, r, self._stride, loop.index) for r in rows}
            for (r, c), total in zip(tile, sums, strict=True):
                b.store(b.call(self._fma, [weights[r], matrix[c], b.load(total)]), total)
        for place, total in zip(places, sums, strict=True):
            b.store(b.load(total), place, align=4)

    def _start(self, row, place):
        if self._fresh:
            return ir.Constant(self._vector, None)  # zeros
        keep = self._spread(self._keep, row, INT64(1), INT64(0))
        return self._builder.fmul(self._builder.load(place, align=4), keep)

    def _matrix_row(self, row, column):
        """A vector's worth of the matrix, in fp32."""
        b = self._builder
        if not self._half:
            return b.load(
                self._place(self._matrix, FP32, row, self._width, column, self._vector), align=4
            )
        bits, words = (ir.VectorType(kind, self.lanes) for kind in (INT16, INT32))
        place = self._place(self._matrix, INT16, row, self._width, column, bits)
        wide = b.zext(b.load(place, align=2), words)
        return b.bitcast(b.shl(wide, ir.Constant(words, [16] * self.lanes)), self._vector)

    def _spread(self, base, row, stride, column):
        """The fp32 number at [row, column], in every lane."""
        b = self._builder
        number = b.load(self._place(base, FP32, row, stride, column, FP32), align=4)
        nothing = ir.Constant(self._vector, ir.Undefined)
        first = ir.Constant(ir.VectorType(INT32, self.lanes), None)  # of which lane: the first
        return b.shuffle_vector(b.insert_element(nothing, number, INT32(0)), nothing, first)

    def _prefetch(self, row):
        prefetch = _instruction(
            self._builder, "llvm.prefetch.p0", ir.VoidType(), [cgutils.voidptr_t, *[INT32] * 3]
        )
        element = INT16 if self._half else FP32
        size = _bytes(element)
        for column in range(0, self._width, CACHE_LINE // size):
            place = self._place(self._ahead, element, row, self._width, INT64(column), INT8)
            read, nearest, data = INT32(0), INT32(3), INT32(1)
            self._builder.call(prefetch, [place, read, nearest, data])

    def _place(self, base, element, row, stride, column, kind):
        """A pointer of this kind to [row, column] of elements at an address."""
        b = self._builder
        stride = INT64(stride) if isinstance(stride, int) else stride
        number = b.add(b.mul(row, stride), column)
        return b.inttoptr(b.add(base, b.mul(number, INT64(_bytes(element)))), kind.as_pointer())


def _bytes(element):
    return 4 if element is FP32 else element.width // 8


def _instruction(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


# ---- numbers ---------------------------------------------------------------------------------


def to_fp32(element):
    """An element of an array, which is fp32 or the bits of bf16."""
    raise NotImplementedError("for compiled code")


@overload(to_fp32)
def _to_fp32(element):
    if isinstance(element, types.Float):
        return lambda element: element
    return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)


def to_element(number, array):
    """The fp32 number as this array holds it: bf16 is rounded to the nearest, halves to even."""
    raise NotImplementedError("for compiled code")


@overload(to_element)
def _to_element(number, array):
    if isinstance(array.dtype, types.Float):
        return lambda number, array: number

    def rounded(number, array):
        bits = np.uint32(np.float32(number).view(np.uint32))
        up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + up) >> np.uint32(16))

    return rounded


@njit(fastmath=EXACT, error_model="numpy")
def exp2(x):
    """2**x for x <= 0, within two units in the last place; 2**-126 for whatever is less.

    Arithmetic and no call, so it takes a vector at a time. The polynomial is that of degree 5 whose
    highest relative error between -1/2 and 1/2 is least.
    """
    x = np.float32(-126) if x < np.float32(-126) else x
    n = np.floor(x + np.float32(0.5))
    x = x - n
    y = np.float32(0.00132647273)
    y = y * x + np.float32(0.00967151299)
    y = y * x + np.float32(0.0555073358)
    y = y * x + np.float32(0.240222424)
    y = y * x + np.float32(0.693147004)
    y = y * x + np.float32(1)
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=EXACT, error_model="numpy")
def cap(scores, softcap):
    """softcap * tanh(scores / softcap), in place."""
    for k in range(len(scores)):
        x = scores[k] / softcap
        e = exp2(np.float32(-2 * LOG2_E) * abs(x))
        t = (np.float32(1) - e) / (np.float32(1) + e)
        scores[k] = softcap * (t if x > 0 else -t)


@njit(fastmath={"contract", "reassoc"}, error_model="numpy")
def to_weights(scores, top):
    """2**(score - top) in place of each score, and their sum."""
    total = np.float32(0)
    for k in range(len(scores)):
        scores[k] = exp2(scores[k] - top)
        total += scores[k]
    return total


# ---- the kernels -----------------------------------------------------------------------------


@njit(inline="always")
def store_token(call, token, head, dim, block_size, kind):
    """A head of the token's key and value, into its slot."""
    block = carray(at(call.token_blocks), (1,), np.int64)[token]
    offset = carray(at(call.token_offsets), (1,), np.int64)[token]
    key, value = carray(at(call.key), (1,), kind), carray(at(call.value), (1,), kind)
    keys = carray(at(call.keys), (1, call.heads, dim, block_size), kind)
    values = carray(at(call.values), (1, call.heads, block_size, dim), kind)
    for d in range(dim):
        keys[block, head, d, offset] = key[token * call.key_stride + head * dim + d]
    for d in range(dim):
        values[block, head, offset, d] = value[token * call.value_stride + head * dim + d]


@cache
def store_kernel(dim: int, block_size: int, half: bool) -> CFunc:
    """What stores the keys and values of tasks of several tokens."""
    kind = np.uint16 if half else np.float32

    def store(pointer):
        call = carray(pointer, 1)[0]
        tasks = carray(at(call.tasks), (1, 4), np.int64)
        while True:
            number = take(call.counter)
            if number >= call.num_tasks * call.heads:
                return
            first, count = tasks[number // call.heads, 1], tasks[number // call.heads, 2]
            if count > 1:
                for token in range(first, first + count):
                    store_token(call, token, number % call.heads, dim, block_size, kind)

    return _compiled(store)


@njit(inline="always")
def see_block(softmax, row, blocks, begin, end, softcap, shape):
    """What a token's `shared` queries, from `row` on, take from keys begin to end of a block.

    `blocks` are the addresses of its keys, its values, and the keys to be seen next.
    """
    q, sums, tops, totals, keep, scores = softmax
    keys, values, following = blocks
    shared, dim, block_size, half = shape
    queries = q.ctypes.data + 4 * dim * row
    sum_rows(scores.ctypes.data, 0, queries, dim, keys, values, dim, shared, block_size, half)
    for r in range(shared):
        if softcap > 0:
            cap(scores[r], softcap)
        scores[r, :begin] = -np.inf
        scores[r, end:] = -np.inf
        top = max(tops[row + r], highest(scores[r].ctypes.data, block_size))
        keep[r] = exp2(tops[row + r] - top)
        tops[row + r] = top
        totals[row + r] = totals[row + r] * keep[r] + to_weights(scores[r], top)
    seen = values + (2 if half else 4) * dim * begin
    weights, outputs = scores.ctypes.data + 4 * begin, sums.ctypes.data + 4 * dim * row
    count = end - begin
    sum_rows(
        outputs, keep.ctypes.data, weights, block_size, seen, following, count, shared, dim, half
    )


@njit(inline="always")
def load_queries(call, task, head, q, shared, dim, kind):
    """The task's queries of a head, scaled."""
    query, scale = carray(at(call.query), (1,), kind), np.float32(call.scale)
    for t in range(task[2]):
        for g in range(shared):
            place = (task[1] + t) * call.query_stride + (head * shared + g) * dim
            for d in range(dim):
                q[t * shared + g, d] = to_fp32(query[place + d]) * scale


@njit(inline="always")
def write_outputs(call, task, head, sums, totals, shared, dim, kind):
    out = carray(at(call.out), (1, call.heads, shared, dim), kind)
    for t in range(task[2]):
        for g in range(shared):
            share = np.float32(1) / totals[t * shared + g]
            for d in range(dim):
                number = sums[t * shared + g, d] * share
                out[task[1] + t, head, g, d] = to_element(number, out)


@cache
def attention_kernel(shared: int, dim: int, block_size: int, half: bool) -> CFunc:
    """What attends, and stores what tasks of one token bring. A kv head has `shared` queries."""
    kind, block_bytes = np.uint16 if half else np.float32, (2 if half else 4) * dim * block_size
    shape, rows = (shared, dim, block_size, half), TILE * shared

    def attend(pointer):
        call = carray(pointer, 1)[0]
        softcap = np.float32(call.softcap)
        tasks = carray(at(call.tasks), (1, 4), np.int64)
        tables = carray(at(call.tables), (1, call.table_stride), np.int64)
        q, sums = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
        tops, totals = np.empty(rows, np.float32), np.empty(rows, np.float32)
        keep, scores = np.empty(shared, np.float32), np.empty((shared, block_size), np.float32)
        softmax = q, sums, tops, totals, keep, scores
        while True:
            number = take(call.counter)
            if number >= call.num_tasks * call.heads:
                return
            head, task = number % call.heads, tasks[number // call.heads]
            table, count, position = tables[task[0]], task[2], task[3]
            if count == 1:
                store_token(call, task[1], head, dim, block_size, kind)
            load_queries(call, task, head, q, shared, dim, kind)
            sums[:], tops[:], totals[:] = np.float32(0), np.float32(-np.inf), np.float32(0)
            last = (position + count - 1) // block_size
            for index in range(max(0, position - call.window + 1) // block_size, last + 1):
                here = block_bytes * (table[index] * call.heads + head)
                then = block_bytes * (table[min(index + 1, last)] * call.heads + head)
                blocks = call.keys + here, call.values + here, call.keys + then
                for t in range(count):
                    end = position + t + 1 - index * block_size
                    begin, end = max(0, end - call.window), min(end, block_size)
                    if begin < end:
                        see_block(softmax, t * shared, blocks, begin, end, softcap, shape)
            write_outputs(call, task, head, sums, totals, shared, dim, kind)

    return _compiled(attend)


def _compiled(body) -> CFunc:
    """Once: for the next start it is kept on disk, where there is a place to write."""
    options = {"fastmath": EXACT, "error_model": "numpy"}
    try:
        return cfunc(SIGNATURE, cache=True, **options)(body)
    except RuntimeError:
        return cfunc(SIGNATURE, **options)(body)
