"""The memory table: what a model takes on its device, planned from shapes and measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from engine.attention.kv_cache import KVCache
from engine.device.facts import available_memory, total_memory
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.memory import estimate
from engine.memory.draft_plan import draft_kv_bytes
from engine.memory.image_plan import embedding_bytes, pixel_bytes
from engine.memory.kv_budget import margin
from engine.memory.model_plan import ModelPlan
from engine.memory.pooler_plan import pooler_bytes
from engine.memory.profile import StepProfile
from engine.memory.rank_plan import nccl_bytes, sum_bytes
from engine.protocol.ready import MemoryEntry

WEIGHTS = "weights"
PACKED_WEIGHTS = "weights in oneDNN's layout"
PROCESSES = "processes without a model"
GRAMMARS = "grammars of structured output"
REQUESTS = "bodies of requests, stored responses"
ROWS = "state of running requests"
GRAPHS = "CUDA graphs"
PROGRAMS = "recorded steps"
LARGEST_STEP = "working memory of the largest step"
KV_CACHE = "KV cache"
STATES = "states of recurrent layers"
DRAFT_WEIGHTS = "weights of the draft model"
DRAFT_GRAPHS = "CUDA graphs of the draft model"
DRAFT_KV_CACHE = "KV cache of the draft model"
ADAPTERS = "LoRA adapters"
IMAGES = "embeddings of images"
PIXELS = "pixels of images"
LENS = "attention weights while a page shows them"
MARGIN = "safety margin"
NCCL = "NCCL, between the GPUs of ranks"
RANK_SUMS = "buffers of sums between GPUs"


class MemoryPlan(NamedTuple):
    """The memory that serving will take, and the memory that is free now."""

    planned: Mapping[str, int]  # bytes by entry
    available: int  # bytes free before anything is loaded
    num_blocks: int
    max_model_len: int


def plan_memory(plan: ModelPlan, available: int | None = None) -> MemoryPlan:
    """Plan from shapes alone. Raises ConfigError if the model does not fit.

    `available` is in bytes; by default it is what the device has free.
    """
    plan.check_weights()
    if available is None:
        available = plan.of_rank(available_memory(plan.device))
    fixed = planned_bytes(plan, 0, plan.max_model_len)
    fixed.pop(MARGIN, None)  # `plan_blocks` subtracts it from what is free
    blocks, length = plan.plan_blocks(available, sum(fixed.values()))
    return MemoryPlan(planned_bytes(plan, blocks, length), available, blocks, length)


def planned_bytes(plan: ModelPlan, num_blocks: int, max_model_len: int) -> dict[str, int]:
    """Bytes by entry, with `num_blocks` KV blocks and sequences of up to `max_model_len`."""
    total = total_memory(plan.device)
    planned = {}
    if total is None:  # the table is that of the host's memory
        planned[PROCESSES] = estimate.PROCESS_BYTES
        planned[REQUESTS] = estimate.REQUEST_BYTES
        if plan.kind != "encoder":
            planned[GRAMMARS] = estimate.grammar_bytes(plan)
    planned[WEIGHTS] = plan.plain_bytes
    if plan.packed_bytes:
        planned[_packed_name(plan)] = plan.packed_bytes
    if plan.adapters is not None:
        planned[ADAPTERS] = plan.adapters.num_bytes
    planned[ROWS] = estimate.rows_bytes(plan, max_model_len)
    if plan.captures_graphs:
        planned[GRAPHS] = estimate.graph_bytes(plan, plan.mixed_graph_shapes)
    if plan.draft is not None:
        planned |= _planned_draft(plan.draft)
        planned[ROWS] += estimate.rows_bytes(plan.draft, plan.draft.max_model_len)
    if plan.program_bytes:
        planned[PROGRAMS] = plan.program_bytes
    planned[LARGEST_STEP] = plan.step_bytes
    planned |= _planned_images(plan, max_model_len)
    if plan.lens_bytes:
        planned[LENS] = plan.lens_bytes
    if plan.states.num_bytes:
        planned[STATES] = plan.states.num_bytes
    if plan.ranks.count > 1 and total is not None:
        planned[NCCL] = nccl_bytes(plan)
        planned[RANK_SUMS] = sum_bytes(plan)
    planned[KV_CACHE] = (num_blocks + 1) * plan.block_bytes if plan.kv_groups else 0
    if total is not None:
        planned[MARGIN] = margin(plan.config, total)
    return planned


def _planned_images(plan: ModelPlan, max_model_len: int) -> dict[str, int]:
    """Bytes by entry of images. Pixels are in the host's memory."""
    planned = {}
    embeddings = embedding_bytes(plan, max_model_len)
    if embeddings:
        planned[IMAGES] = embeddings
    if total_memory(plan.device) is None and embeddings:
        planned[PIXELS] = pixel_bytes(plan, max_model_len)
    return planned


def _planned_draft(draft: ModelPlan) -> dict[str, int]:
    """Bytes by entry of a draft model. Its prompt chunks are not captured."""
    planned = {DRAFT_WEIGHTS: draft.plain_bytes + draft.packed_bytes}
    if draft.captures_graphs:
        planned[DRAFT_GRAPHS] = estimate.graph_bytes(draft, ())
    planned[DRAFT_KV_CACHE] = draft_kv_bytes(draft)
    return planned


def weights_bytes(module: nn.Module) -> int:
    """Return the bytes of all weights and tables, packed or not."""
    plain = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return plain + _packed_bytes(module)


def _packed_bytes(module: nn.Module) -> int:
    layers = [layer for layer in module.modules() if isinstance(layer, Linear | LMHead)]
    return sum(layer.tensors.packed_bytes for layer in layers)


def _packed_name(plan: ModelPlan) -> str:
    return f"{plan.quantization} weights" if plan.quantization else PACKED_WEIGHTS


def measured_bytes(
    plan: ModelPlan,
    kv: KVCache,
    rows_bytes: int,
    profile: StepProfile | None,
    draft_kv: KVCache | None,
) -> dict[str, int]:
    """Bytes by entry, of a loaded model. `profile` is a GPU's; a CPU's steps are not measured.

    `rows_bytes` and `draft_kv` include, and are, those of a draft model, if there is one.
    """
    packed = sum(_packed_bytes(module) for module in plan.modules)
    measured = {
        WEIGHTS: sum(weights_bytes(module) for module in plan.modules)
        - packed
        + pooler_bytes(plan.pooler),
        _packed_name(plan): packed,
        ROWS: rows_bytes,
        KV_CACHE: kv.num_bytes,
    }
    if kv.states is not None:
        measured[STATES] = sum(part.nbytes for layer in kv.states for part in layer)
    if plan.draft is not None and draft_kv is not None:
        measured[DRAFT_WEIGHTS] = weights_bytes(plan.draft.module)
        measured[DRAFT_KV_CACHE] = draft_kv.num_bytes
    if profile is not None:
        measured[LARGEST_STEP] = profile.step_bytes
        measured[GRAPHS] = profile.graph_bytes
    if plan.ranks.count > 1 and plan.device.type == "cuda":
        measured[NCCL] = plan.ranks.connection_bytes
    return measured


def memory_entries(
    planned: Mapping[str, int], measured: Mapping[str, int]
) -> tuple[MemoryEntry, ...]:
    """The table that is sent to the server: each planned entry with its measurement, if any."""
    return tuple(MemoryEntry(name, size, measured.get(name)) for name, size in planned.items())
