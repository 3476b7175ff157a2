"""The bytes that a model will take, estimated from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from engine.attention.torch.batching import MAX_SCORES, SPLIT
from engine.grammar import limits
from engine.layers.embedding import LMHead
from engine.layers.experts import Experts
from engine.layers.linear import Linear
from engine.layers.weights.pack import gives_rows, is_packed, nbytes_of
from engine.memory.graph_shapes import GraphShape, decode_sizes
from engine.memory.image_plan import encoder_bytes
from engine.memory.pooler_plan import pooler_bytes
from engine.ops.arena import CHUNK_BYTES, MOST_BYTES
from engine.ops.codes import Quantization
from engine.scheduling.drafts import MOST_ROWS

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan

Layer = TypeVar("Layer")

GRAPH_BYTES = 4 << 20  # what CUDA keeps for a graph of some hundred kernels; a guess
PROGRAM_ROWS = 256  # of the largest step that a CPU records
DECODE_PROGRAM_ROWS = 32  # of the largest step of decodes that a CPU records from ids to tokens
PROGRAMS = 64  # most that are kept
PROGRAM_BYTES = 256 << 10  # of a step's arguments: 150 KB with 30 layers; a guess for others
ROW_PARAMETER_BYTES = 36  # all of a row of SequenceRows but its tokens and blocks
NUMBER_BYTES = 12  # of each number of a sequence in a step of decodes
# Python and the libraries of the engine, of the API process and of the one that renders templates,
# measured as resident memory, with the kernels that oneDNN compiles for a model.
PROCESS_BYTES = 440_000_000
# Most that the API process holds of open requests, and of responses that others continue: the
# defaults of the server (MIN_BODY_BUDGET in server/http/auth.py, --response-store-bytes).
REQUEST_BYTES = (256 + 64) << 20
DRAW_ROOM = 3  # rows of a thread of the CPU's kernel (engine/kernels/numba/draw.py)
LOGITS_COPIES = 6  # as computed, tempered, and as probabilities in two orders with their indices


def weight_bytes(plan: ModelPlan) -> int:
    """Parameters in the served dtype, and the tables computed from the configuration.

    A tied head is packed too. The token embedding keeps its own table if that changes numbers.
    """
    numbers = plan.rank_parameters
    heads = _layers(plan, LMHead)
    numbers += sum(head.table.numel() for head in heads if _copies_table(plan, head))
    tables = sum(buffer.nbytes for buffer in plan.module.buffers())
    pooler = pooler_bytes(plan.pooler)
    return numbers * plan.dtype.itemsize + _wider_bytes(plan) + tables + pooler


def _copies_table(plan: ModelPlan, head: LMHead) -> bool:
    """Whether the packed form of a tied head is another copy of the table."""
    if head.weight is not None or not _packs(plan, head, head.table):
        return False
    if head.tensors.stored_form is not None:
        return not head.tensors.stored_form.is_exact
    inputs, dtype = head.table.shape[1], _dtype_of(plan, head)
    return not gives_rows(inputs, dtype, plan.kernels, _rounds_to(plan, head))


def _wider_bytes(plan: ModelPlan) -> int:
    """The bytes that parameters take more because they do not have the dtype of the model."""
    total = 0
    for layer in _layers(plan, Linear):
        wider = _dtype_of(plan, layer).itemsize - plan.dtype.itemsize
        total += wider * sum(each.numel() for each in layer.parameters(recurse=False))
    return total


def _dtype_of(plan: ModelPlan, layer: Linear | LMHead) -> torch.dtype:
    return layer.tensors.dtype or plan.dtype


def plain_bytes(plan: ModelPlan) -> int:
    """Weights that are not packed, and tables."""
    packed = sum(
        weight.numel() * _dtype_of(plan, layer).itemsize for layer, weight in _packed(plan)
    )
    return weight_bytes(plan) - packed


def packed_bytes(plan: ModelPlan) -> int:
    """Weights that will be kept in oneDNN's packed layout, or quantised."""
    return sum(
        nbytes_of(
            weight.shape[0],
            weight.shape[1],
            isinstance(layer, LMHead),
            _dtype_of(plan, layer),
            plan.kernels,
            _rounds_to(plan, layer),
            layer.tensors.stored_form,
            has_bias=isinstance(layer, Linear) and layer.bias is not None,
        )
        for layer, weight in _packed(plan)
    )


def loading_bytes(plan: ModelPlan) -> int:
    """Most bytes of weights while they are loaded: a layer with codes was plain before."""
    plain = 0
    if plan.quantization:
        sizes = [weight.numel() for _, weight in _packed(plan)]
        plain = max(sizes, default=0) * plan.dtype.itemsize
    return plain_bytes(plan) + packed_bytes(plan) + plain


def _packed(plan: ModelPlan) -> list[tuple[Linear | LMHead, torch.Tensor]]:
    """Return the layers that will be packed, each with its weight [outputs, inputs]."""
    weights: list[tuple[Linear | LMHead, torch.Tensor]] = [
        (layer, layer.weight) for layer in _layers(plan, Linear) if layer.weight is not None
    ]
    weights += [(head, head.table) for head in _layers(plan, LMHead)]
    return [(layer, weight) for layer, weight in weights if _packs(plan, layer, weight)]


def _packs(plan: ModelPlan, layer: Linear | LMHead, weight: torch.Tensor) -> bool:
    form = plan.kernels, _rounds_to(plan, layer)
    return plan.packs and is_packed(weight.shape[1], isinstance(layer, LMHead), *form)


def _rounds_to(plan: ModelPlan, layer: Linear | LMHead) -> Quantization | None:
    return None if isinstance(layer, Linear) and not layer.is_rounded else plan.rounds_to


def grammar_bytes(plan: ModelPlan) -> int:
    """Most memory on the host of the processes of grammars, which only the first rank has."""
    return 0 if plan.kind == "encoder" or plan.ranks.own else limits.ALL_BYTES


def rows_bytes(plan: ModelPlan, max_model_len: int) -> int:
    """Device state of running sequences: SequenceRows."""
    blocks = -(-max_model_len // plan.config.block_size)
    token_ids = 4 * (max_model_len + 1)
    block_ids = 8 * blocks * len(plan.kv_groups)
    rows = plan.config.max_num_seqs + 1  # with the padding row
    numbers = max(rows, MOST_ROWS + 1) * NUMBER_BYTES
    return rows * (token_ids + block_ids + ROW_PARAMETER_BYTES) + numbers


def step_bytes(plan: ModelPlan) -> int:
    """Peak memory of the largest step, without weights and KV.

    That is the widest linear over all tokens, or one layer's attention at full length, or the
    logits of all sequences. A prediction head keeps hidden states, up to a block of each sequence.
    """
    size = plan.dtype.itemsize
    layer = _layer_bytes(plan, _layer_tokens(plan))
    samples = 0
    if plan.kind != "encoder":
        most = max(plan.config.max_num_seqs, MOST_ROWS)
        samples = min(most, plan.max_num_batched_tokens)
    logits = _logits_rows(plan, samples) * plan.model.config.vocab_size * 4
    kept = 0 if plan.trunk is None else plan.trunk.num_bytes
    if plan.prediction.module is not None:
        hidden = max(head.table.shape[1] for head in _layers(plan, LMHead))
        kept += plan.config.max_num_seqs * plan.config.block_size * hidden * size
    # A unit of an image's encoding runs between two steps.
    return max(layer, _attention_bytes(plan), logits, encoder_bytes(plan)) + kept


def _logits_rows(plan: ModelPlan, samples: int) -> int:
    """Return how many rows of the size of the logits a step keeps for `samples` rows.

    On a CPU the kernel draws from the logits as they are, and each thread has room for a row's
    cuts. Or the rows want logprobs.
    """
    if plan.kernels != "numba":
        return samples * LOGITS_COPIES
    return samples + max(samples, DRAW_ROOM * min(samples, plan.threads))


def _layer_bytes(plan: ModelPlan, tokens: int) -> int:
    """Most bytes that one layer takes for this number of tokens."""
    linears = [layer.weight for layer in _layers(plan, Linear)]
    widths = [sum(weight.shape) for weight in linears if weight is not None]
    specs = plan.attention_specs
    widths += [spec.num_heads * (spec.head_dim + spec.result_dim) for spec in specs]
    return 2 * tokens * max(widths, default=0) * plan.dtype.itemsize


def program_bytes(plan: ModelPlan) -> int:
    """The memory that recorded steps share (`engine/ops/arena.py`), and their arguments."""
    if plan.backend.name != "numba" or plan.ranks.count > 1 or plan.kind == "encoder":
        return 0
    rows = min(PROGRAM_ROWS, plan.max_num_batched_tokens)
    copies = 1 + max((layer.shape.per_token for layer in _layers(plan, Experts)), default=0)
    shared = 2 * CHUNK_BYTES + copies * _layer_bytes(plan, rows)
    decodes = 2 * CHUNK_BYTES + copies * _layer_bytes(plan, DECODE_PROGRAM_ROWS)
    decodes += DECODE_PROGRAM_ROWS * 4 * plan.model.config.vocab_size  # logits
    num_programs = PROGRAMS + DECODE_PROGRAM_ROWS
    return min(shared, MOST_BYTES) + min(decodes, MOST_BYTES) + num_programs * PROGRAM_BYTES


def graph_bytes(plan: ModelPlan, shapes: Sequence[GraphShape]) -> int:
    """Buffers of the largest captured step, what that step holds, and what the driver keeps.

    `shapes` are those with prompt chunks, the largest last.
    """
    sizes = decode_sizes(plan.config.max_num_seqs)
    tokens = sizes[-1]
    if shapes:
        tokens = max(tokens, shapes[-1].decodes + shapes[-1].chunk_tokens)
    logits = 3 * sizes[-1] * plan.model.config.vocab_size * 4
    step = plan.step_bytes * tokens // _layer_tokens(plan)
    steps = len(sizes) + len(shapes)
    if plan.adapters is not None:  # each step has a variant with adapters
        steps *= 2
    graphs = steps + len(sizes)  # a decode size has a second graph, which draws
    return logits + step + graphs * GRAPH_BYTES


def _layers(plan: ModelPlan, kind: type[Layer]) -> list[Layer]:
    every = [layer for module in plan.modules for layer in module.modules()]
    return [layer for layer in every if isinstance(layer, kind)]


def _encoder_tokens(plan: ModelPlan) -> int:
    """Most tokens of texts in a step: a text longer than the budget goes alone."""
    return max(plan.max_num_encoder_tokens, plan.max_model_len)


def _layer_tokens(plan: ModelPlan) -> int:
    """Most tokens that pass a layer at once."""
    if plan.kind == "decoder":
        return plan.max_num_batched_tokens
    if plan.kind == "encoder":
        return _encoder_tokens(plan)
    return max(plan.max_num_batched_tokens, _encoder_tokens(plan))


def _attention_bytes(plan: ModelPlan) -> int:
    """Scores and weights of one layer. Only the torch backend writes them to memory."""
    if plan.backend.name != "torch":
        return 0
    scores = 0
    for spec in plan.attention_specs:
        if spec.kind == "full" or plan.trunk is not None:
            per_head = _text_scores(plan)
        else:
            per_head = plan.max_num_batched_tokens * plan.max_model_len
        scores = max(scores, spec.num_heads * per_head)
    return scores * (2 * plan.dtype.itemsize + 4)


def _text_scores(plan: ModelPlan) -> int:
    """Attention scores of one head for the largest group of texts that is computed together."""
    tokens, longest = _encoder_tokens(plan), plan.max_model_len
    keys = -(-longest // SPLIT) * SPLIT
    return min(tokens * keys, max(keys, tokens * SPLIT, MAX_SCORES))
