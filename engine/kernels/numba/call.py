"""The arguments of CPU kernels: structures that Python fills in and kernels read.

The memory that a structure points to must outlive the call.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

INT, FLOAT = ctypes.c_int64, ctypes.c_double
CACHE_LINE = 64  # bytes
LOG2_E = math.log2(math.e)
GROUP = 32  # inputs whose weights share a scale in quantised layers
SPAN = 4  # groups of inputs that share a scale of these inputs; the last span may be shorter
LANES = 16  # outputs of a panel of quantised weights
# An input of a quantised layer is an outlier if it is above this many times its row's root mean
# square. The others of its span would lose too much of their 8 bits.
OUTLIER_FROM = 3.25
KEY_PANEL = 64  # keys of a span that are packed together
TILE = 8  # tokens of a chunk that read a block while it is in the L1 cache
# Forms of keys and values in the cache. Those in pairs are bf16, too: they are multiplied by bf16.
AS_FP32, AS_BF16, AS_INT8, AS_E4M3, IN_PAIRS = range(5)
ITEM_BYTES = (4, 2, 1, 1, 2)  # by form; those of one byte are codes, which have scales
WEIGHT_BYTES = (4, 4, 4, 4, 2)  # of the queries, or of the softmax's weights, that multiply them
# The operations on a row. Activations multiply the other half of the row if they are gated.
NORM, LAYER_NORM, ROTATION, PAIR_ROTATION = range(4)
GATED_SILU, GATED_GELU, GATED_GELU_TANH, GELU, GELU_TANH = range(4, 9)
# The operations on a row and its gate, which is a separate tensor.
SIGMOID_MUL, NORM_THEN_GATE, GATE_THEN_NORM = range(3)
TASK = np.dtype(
    [
        ("sequence", np.int64),
        ("first_token", np.int64),
        ("num_tokens", np.int64),
        ("position", np.int64),  # of the first token
        ("num_keys", np.int64),  # of the sequence, with those of later tokens
        ("is_stored_ahead", np.int64),  # keys and values are stored before any task attends
    ],
    align=True,
)


SPAN_TASK = np.dtype(
    [
        ("first_token", np.int64),  # of the span
        ("length", np.int64),  # of the span
        ("packed", np.int64),  # packed keys of a head before those of the span
        ("head", np.int64),
        ("first_row", np.int64),  # of the span's tokens
        ("rows", np.int64),
    ],
    align=True,
)
ROW_FIELD = np.dtype(
    [
        ("offset", np.int64),  # of the field in an expert's call
        ("base", np.int64),  # address of the first row of all experts, or a value for each
        ("row_bytes", np.int64),  # 0 for a value
    ],
    align=True,
)
OUTLIER = np.dtype(
    [
        ("codes", np.int32),  # byte of the cache line with the input's codes in a panel
        ("shift", np.int32),  # bit of the codes in each 32 of this line
        ("scales", np.int32),  # byte of the scales of the input's group in a panel
        ("number", np.float32),  # the input
    ],
    align=True,
)
LAUNCH = np.dtype([("kernel", np.int64), ("call", np.int64)], align=True)  # addresses


class ProgramCall(ctypes.Structure):
    """Arguments of a run of recorded kernels."""

    _fields_ = [
        ("counter", INT),  # address of the count of threads that ended a launch
        ("launches", INT),  # address of [launches] LAUNCH
        ("first", INT),  # only the launches [first, end) run
        ("end", INT),
        ("team_size", INT),  # address of OpenMP's function omp_get_num_threads
    ]


class AttentionCall(ctypes.Structure):
    """Arguments of attention for a step's tasks in one layer."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next task
        ("num_tasks", INT),
        ("num_attended", INT),  # only the first tasks attend; the others only store their KV
        ("tasks", INT),  # address of [tasks] TASK
        ("heads", INT),  # kv heads
        ("parts", INT),  # of the query heads of a kv head; a task runs once per part
        ("shared", INT),  # query heads in a part
        ("dim", INT),  # head_dim, a multiple of 8
        ("value_dim", INT),  # the same, or a multiple of 16 if values are parts of keys
        ("block_size", INT),  # a multiple of 16
        ("tables", INT),  # address of [sequences, table_stride] block ids
        ("table_stride", INT),
        ("token_blocks", INT),  # address of [T]
        ("token_offsets", INT),  # address of [T]
        ("query", INT),  # address of [T, H, D], tokens query_stride elements apart
        ("query_stride", INT),
        ("key", INT),  # address of [T, Hkv, D], tokens key_stride elements apart
        ("key_stride", INT),
        ("value", INT),  # address of [T, Hkv, D], tokens value_stride elements apart
        ("value_stride", INT),
        ("keys", INT),  # address of [blocks, Hkv, D, block_size]
        ("values", INT),  # address of [blocks, Hkv, block_size, D]; 0: they are parts of keys
        ("key_scales", INT),  # address of [blocks, Hkv, block_size] fp32, if keys are codes
        ("value_scales", INT),  # likewise; those of the keys if values are parts of them
        ("sinks", INT),  # address of [H], or 0
        ("out", INT),  # address of [T, H, value_dim]
        ("window", INT),  # number of visible keys up to the query's own
        ("later", INT),  # number of visible keys behind it
        ("last_keys", INT),  # address of [T]: the last key that each token sees; 0: its own
        ("scale", FLOAT),  # times log2(e), as weights are powers of two and not of e
        ("softcap", FLOAT),  # times log2(e) likewise; 0: no softcap
    ]


class SpansCall(ctypes.Structure):
    """Arguments of attention within spans of tokens."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next task
        ("num_tasks", INT),
        ("tasks", INT),  # address of [tasks] SPAN_TASK
        ("most_rows", INT),  # of a task
        ("most_scores", INT),  # rows of a task, times the packed keys of its span
        ("heads", INT),
        ("dim", INT),  # head_dim, a multiple of 16
        ("query", INT),  # address of [T, H, D], tokens query_stride elements apart
        ("query_stride", INT),
        ("key", INT),
        ("key_stride", INT),
        ("value", INT),
        ("value_stride", INT),
        ("packed", INT),  # packed keys of a head, P
        ("keys", INT),  # address of [H, P / 64, D / 2, 64, 2]
        ("values", INT),  # address of [H, P * D]: panels of each span
        ("out", INT),  # address of [rows, H, D]
        ("out_row", INT),  # the token of the first row
        ("scale", FLOAT),  # times log2(e)
    ]


class LinearCall(ctypes.Structure):
    """Arguments of a linear layer for few rows."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next group of panels
        ("panels", INT),  # number of panels: groups of outputs that the packed weight interleaves
        ("at_once", INT),  # panels that a thread takes at a time
        ("threads", INT),
        ("weight", INT),  # address of [panels, pairs, outputs of a panel, 2] bf16
        ("bias", INT),  # address of [panels, outputs of a panel] bf16, or 0
        ("pairs", INT),  # number of pairs of inputs
        ("split", INT),  # number of pairs in a partial sum
        ("x", INT),  # address of [rows, 2 * pairs] bf16
        ("x_bytes", INT),  # stride between rows
        ("out", INT),  # address of [rows, outputs] bf16
        ("out_bytes", INT),
        ("rows", INT),
    ]


class CodesCall(ctypes.Structure):
    """Arguments of a linear layer with quantised weights."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next group of panels
        ("panels", INT),  # number of panels of 16 outputs
        ("at_once", INT),  # panels that a thread takes at a time
        ("threads", INT),
        ("codes", INT),  # address of [panels, groups, quads of inputs, 16, 4] codes
        ("scales", INT),  # address of [panels, groups, 16] fp16; with offsets [..., 2, 16]
        ("bias", INT),  # address of [panels, 16] bf16, or 0
        ("groups", INT),  # number of groups of inputs
        ("spans", INT),  # number of spans of groups
        ("x", INT),  # address of [rows, groups, 32] int8
        ("x_scales", INT),  # address of [rows, spans] fp32
        ("x_sums", INT),  # address of [rows, groups] int32; fp32 with offsets (see RoundCall)
        ("num_outliers", INT),  # address of [rows] int32
        ("outliers", INT),  # address of [rows, most_outliers] OUTLIER
        ("most_outliers", INT),
        ("out", INT),  # address of [rows, outputs] bf16 or fp32
        ("out_bytes", INT),
        ("rows", INT),
    ]


class RoundCall(ctypes.Structure):
    """Arguments of the rounding of rows of bf16 to 8 bits, span by span."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next group of rows
        ("rows", INT),
        ("at_once", INT),  # rows that a thread takes at a time
        ("groups", INT),
        ("spans", INT),
        ("bits", INT),  # of the weight's codes
        ("zero", INT),  # the code that stands for 0 in the weights; 0: they have offsets
        ("x", INT),  # address of [rows, groups * 32]
        ("x_stride", INT),  # elements between rows
        ("codes", INT),  # address of [rows, groups, 32] int8
        ("scales", INT),  # address of [rows, spans] fp32
        ("sums", INT),  # address of [rows, groups]: -zero * the sum of the codes in int32, or the
        # sum of the inputs in fp32, with outliers
        ("num_outliers", INT),  # address of [rows] int32
        ("outliers", INT),  # address of [rows, most_outliers] OUTLIER
        ("most_outliers", INT),
    ]


class LookupCall(ctypes.Structure):
    """Arguments of the lookup of rows in a packed weight."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next group of rows
        ("rows", INT),
        ("at_once", INT),  # rows that a thread takes at a time
        ("ids", INT),  # address of [rows]: the outputs of the weight
        ("weight", INT),  # address of panels, as in LinearCall or CodesCall
        ("scales", INT),  # address of the scales of codes
        ("width", INT),  # outputs of a panel of bf16
        ("inputs", INT),
        ("out", INT),  # address of [rows, inputs] bf16
    ]


class ExpertsCall(ctypes.Structure):
    """Arguments of the linear layers of several experts, whose calls are of one type."""

    _fields_ = [
        ("counter", INT),  # address of the number of threads that began
        ("experts", INT),  # number of experts
        ("starts", INT),  # address of [experts + 1]: the first row of each expert
        ("kernel", INT),  # address of the kernel that multiplies
        ("calls", INT),  # address of [experts] calls
        ("call_bytes", INT),
        ("counters", INT),  # address of [experts, 8]: the counters of the calls
        ("fields", INT),  # address of [num_fields] ROW_FIELD
        ("num_fields", INT),
        ("rows_offset", INT),  # of the number of rows in a call
    ]


class RowsCall(ctypes.Structure):
    """Arguments of a row-wise operation."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next group of rows
        ("rows", INT),
        ("at_once", INT),  # rows that a thread takes at a time
        ("size", INT),  # elements in a row of `out`; strides count elements, too
        ("x", INT),  # address of [rows, ...]
        ("x_stride", INT),
        ("other", INT),  # address of the tensor that is added to x, or 0
        ("other_stride", INT),
        ("sum", INT),  # address of [rows, size] for the sum
        ("weight", INT),  # address of [size], or 0
        ("heads", INT),  # rows of a token that lie one behind the other, for a norm of heads
        ("key_head", INT),  # the first head with the other weight
        ("key_weight", INT),  # address of [size], or 0
        ("bias", INT),  # address of [size], or 0
        ("out", INT),  # address of [rows, size]
        ("eps", FLOAT),
        ("offset", FLOAT),  # added to each weight
        ("dim", INT),  # head dimension
        ("width", INT),  # number of rotated dimensions of a head
        ("cos", INT),  # address of [rows, width]
        ("sin", INT),  # address of [rows, width]
    ]


class RecurrenceCall(ctypes.Structure):
    """Arguments of a recurrent layer. Strides count elements; those of heads end with `_head`."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next tile
        ("tokens", INT),
        ("runs", INT),
        ("starts", INT),  # address of [runs + 1]: the first token of each run
        ("reads", INT),  # address of [runs]: slots
        ("writes", INT),  # address of [tokens]: slots, or 0
        ("heads", INT),  # of values
        ("shared", INT),  # heads of values for each head of keys
        ("rows", INT),  # of a state: numbers in a key
        ("columns", INT),  # of a state: numbers in a value
        ("query", INT),  # address of [tokens, heads / shared, rows]
        ("query_stride", INT),
        ("query_head", INT),
        ("key", INT),  # address of [tokens, heads / shared, rows]
        ("key_stride", INT),
        ("key_head", INT),
        ("value", INT),  # address of [tokens, heads, columns]
        ("value_stride", INT),
        ("value_head", INT),
        ("step", INT),  # address of [tokens, heads]: the time step before its softplus
        ("step_stride", INT),
        ("beta", INT),  # address of [tokens, heads]: the delta rule's rate, before its sigmoid
        ("beta_stride", INT),
        ("gate_bytes", INT),  # of a number of `step` and `beta`
        ("a_log", INT),  # address of [heads]
        ("dt_bias", INT),  # address of [heads]
        ("skip", INT),  # address of [heads]: the share of the value in the result, or 0
        ("vector_bytes", INT),  # of a number of `a_log`, `dt_bias` and `skip`
        ("scale", FLOAT),  # of queries
        ("states", INT),  # address of [slots + 1, heads, rows, columns] fp32
        ("out", INT),  # address of [tokens, heads, columns]
    ]


class ConvCall(ctypes.Structure):
    """Arguments of a causal convolution."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next tile of channels
        ("tokens", INT),
        ("runs", INT),
        ("starts", INT),  # address of [runs + 1]: the first token of each run
        ("reads", INT),  # address of [runs]: slots
        ("writes", INT),  # address of [tokens]: slots, or 0
        ("channels", INT),
        ("width", INT),  # inputs in a sum
        ("x", INT),  # address of [tokens, channels]
        ("x_stride", INT),  # elements between tokens
        ("weight", INT),  # address of [channels, width]
        ("bias", INT),  # address of [channels], or 0
        ("silu", INT),  # 1: applied to the sums
        ("tails", INT),  # address of [slots + 1, width - 1, channels]
        ("out", INT),  # address of [tokens, channels]
    ]


class GatedCall(ctypes.Structure):
    """Arguments of an operation on rows with gates. A token has a row for each of its heads."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next group of rows
        ("rows", INT),
        ("at_once", INT),  # rows that a thread takes at a time
        ("heads", INT),
        ("size", INT),  # elements in a row; strides count elements, too
        ("x", INT),  # address of [tokens, heads, size]
        ("x_stride", INT),
        ("x_head", INT),  # stride between heads
        ("gate", INT),  # address of [tokens, heads, size]
        ("gate_stride", INT),
        ("gate_head", INT),
        ("weight", INT),  # address of the norm's [size], or of [heads, size]
        ("weight_head", INT),
        ("out", INT),  # address of [tokens, heads, size]
        ("eps", FLOAT),
    ]


class DrawCall(ctypes.Structure):
    """Arguments of the draw of a token for each row of logits."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next row
        ("slots", INT),  # address of the number of threads that took room, now and before
        ("rooms", INT),  # number of threads that may take a row
        ("rows", INT),
        ("size", INT),  # logits in a row
        ("logits", INT),  # address of [rows, size] fp32
        ("stride", INT),  # elements between rows
        ("temperature", INT),  # address of [rows] fp32
        ("top_k", INT),  # address of [rows] int32
        ("top_p", INT),  # address of [rows] fp32
        ("min_p", INT),  # address of [rows] fp32
        ("seeds", INT),  # address of [rows] int64
        ("positions", INT),  # address of [rows] int64
        ("room", INT),  # address of [rooms, 3, size] of 4 bytes each
        ("tokens", INT),  # address of [rows] int64
        ("invalid", INT),  # the token of a row whose logits are not finite
        ("greedy_below", FLOAT),
    ]
