"""The kernels that a model needs on a CPU.

Layers request kernels one after another, while weights are packed and the first token is computed.
`needed_kernels` lists them before, so that they are compiled at the same time: a kernel that it
misses is compiled when it is requested.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.numba import FORMS, attention_form
from engine.kernels.numba.call import (
    GATE_THEN_NORM,
    GATED_GELU,
    GATED_GELU_TANH,
    GATED_SILU,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NORM,
    NORM_THEN_GATE,
    PAIR_ROTATION,
    ROTATION,
    SIGMOID_MUL,
)
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.draw import DRAW
from engine.kernels.numba.linear import (
    HEAD_PANEL,
    PANEL,
    can_multiply_head,
    has_kernel,
    kernel_of,
    packs_padded,
    tiles_problem,
)
from engine.kernels.numba.lookup import PANELS_LOOKUP, codes_lookup
from engine.kernels.numba.sequence_rows import DECODE_KERNELS
from engine.kernels.numba.span_attention import attend_kernel, pack_kernel, supports
from engine.layers.attention import RotaryAttention
from engine.layers.embedding import LMHead
from engine.layers.experts import Experts
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.mlp import ACTIVATIONS, GATED_OF_ENCODERS, MLP
from engine.layers.norm import GatedRMSNorm, GroupedRMSNorm, LayerNorm, PlainRMSNorm, RMSNorm
from engine.layers.recurrent import CausalConv
from engine.layers.rotary import PairRotaryEmbedding, RotaryEmbedding
from engine.layers.span_attention import SpanAttention
from engine.layers.weights.pack import has_kernel as has_codes_kernel
from engine.layers.weights.pack import kind_of
from engine.memory.model_plan import ModelPlan
from engine.ops.quantize import BITS

USUAL_WIDTH = HEAD_PANEL  # outputs per panel of most weights that oneDNN packs
OPERATIONS = {
    GATED_OF_ENCODERS["silu"]: GATED_SILU,
    GATED_OF_ENCODERS["gelu"]: GATED_GELU,
    GATED_OF_ENCODERS["gelu_pytorch_tanh"]: GATED_GELU_TANH,
    ACTIVATIONS["gelu"]: GELU,
    ACTIVATIONS["gelu_new"]: GELU_TANH,
}


def needed_kernels(plan: ModelPlan) -> set[Kernel]:
    """Return the kernels that loading the model of `plan` and its first token will request."""
    is_half = int(plan.dtype == torch.bfloat16)
    form = FORMS[plan.kv_dtype]
    needed: set[Kernel] = set()
    if plan.backend.name == "numba":
        needed.add(("store_kv.store_kernel", is_half, form))
        attention = attention_form(plan.dtype, plan.kv_dtype)
        needed.add(("attention.attention_kernel", is_half, attention))
    if plan.backend.name == "numba" and plan.ranks.count == 1:
        needed.add(("program.program_kernel",))
        if plan.kind != "encoder":
            needed.update(DECODE_KERNELS)
    if plan.kernels == "numba" and plan.kind != "encoder":
        needed.add(DRAW)
    for layer in [layer for module in plan.modules for layer in module.modules()]:
        if isinstance(layer, Linear | LMHead) and plan.packs:
            needed.update(_of_weight(plan, layer))
        for operation in _row_operations(layer):
            needed.add(("rowwise.rows_kernel", operation, is_half))
        needed.update(_of_recurrent(layer, is_half))
        if isinstance(layer, SpanAttention) and plan.kernels == "numba":
            needed.update(_of_spans(layer.spec.head_dim, plan.dtype))
    return needed


def _of_spans(head_dim: int, dtype: torch.dtype) -> Iterator[Kernel]:
    """Yield the kernels that attend to the patches of an image."""
    if supports(dtype, head_dim):
        yield pack_kernel(head_dim)
        yield attend_kernel(head_dim)


def _row_operations(layer: torch.nn.Module) -> Iterator[int]:
    match layer:
        case RMSNorm() | PlainRMSNorm():
            yield NORM
        case LayerNorm():
            yield LAYER_NORM
        case RotaryEmbedding():
            yield PAIR_ROTATION if layer.pairs else ROTATION
        case PairRotaryEmbedding():
            yield PAIR_ROTATION
        case MLP() | Experts():
            if layer.activation in OPERATIONS:
                yield OPERATIONS[layer.activation]


def _of_recurrent(layer: torch.nn.Module, is_half: int) -> Iterator[Kernel]:
    """Yield the kernels of a part of a recurrent layer, or of an attention with gated outputs."""
    match layer:
        case CausalConv():
            yield "causal_conv.conv_kernel", is_half
        case GatedDeltaNet():
            yield "recurrence.recurrence_kernel", 1, is_half
        case Mamba2():
            yield "recurrence.recurrence_kernel", 0, is_half
        case GatedRMSNorm():
            yield "gated.gated_kernel", NORM_THEN_GATE, is_half
        case GroupedRMSNorm():
            yield "gated.gated_kernel", GATE_THEN_NORM, is_half
        case RotaryAttention() if layer.is_gated:
            yield "gated.gated_kernel", SIGMOID_MUL, is_half


def _of_weight(plan: ModelPlan, layer: Linear | LMHead) -> Iterator[Kernel]:
    """Yield the kernels that multiply a packed weight."""
    is_head = isinstance(layer, LMHead)
    weight = layer.table if isinstance(layer, LMHead) else layer.weight
    assert weight is not None
    inputs = weight.shape[-1]
    has_bias = isinstance(layer, Linear) and layer.bias is not None
    is_rounded = not isinstance(layer, Linear) or layer.is_rounded
    kind = kind_of(inputs, is_head, plan.rounds_to) if is_rounded else None
    if layer.tensors.stored_form is not None:
        bits, has_offsets, is_exact = layer.tensors.stored_form
        if is_exact and layer.weight is None:
            yield codes_lookup(bits, has_offsets=has_offsets)
    elif kind is not None and has_codes_kernel(kind, plan.dtype, plan.kernels):
        bits, has_offsets = BITS[kind], kind == "int4"
    elif is_head and can_multiply_head(inputs, plan.dtype):
        in_tiles = tiles_problem() is None
        yield kernel_of(HEAD_PANEL, has_bias=False, wide=True, in_tiles=in_tiles)
        if layer.weight is None:
            yield PANELS_LOOKUP
        return
    else:
        if has_kernel(plan.dtype) and not is_head:
            is_padded = packs_padded(len(weight), inputs, plan.dtype, has_bias=has_bias)
            width, in_tiles = PANEL if is_padded else USUAL_WIDTH, tiles_problem() is None
            yield kernel_of(width, has_bias=has_bias, wide=False, in_tiles=in_tiles)
        return
    yield ("codes.round_kernel",)
    yield "codes.multiply_kernel", bits, int(has_offsets), int(has_bias), int(is_head)
