"""Make the runner of a plan: its KV cache, rows, graphs and programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from engine.attention.kv_cache import KVCache, LayerStates
from engine.device.gauges import ProcessGauges
from engine.device.openmp_wait import OpenMPWait
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matchers import Matchers
from engine.layers.state import new_states
from engine.memory.graph_shapes import GraphShape
from engine.memory.model_plan import ModelPlan
from engine.models.adapters import ModelAdapters
from engine.models.base import has_image_axes
from engine.runner.encoder import Encoder
from engine.runner.explanations import Explanations
from engine.runner.forward import Forward, ModelForward
from engine.runner.image_positions import image_positions
from engine.runner.model_runner import DrawDecodes, ModelRunner
from engine.runner.recorder import CudaRecorder, Recorder
from engine.runner.sequence_rows import SequenceRows
from engine.runner.step_graphs import StepGraphs
from engine.sampling.sampler import draw


def make_runner(
    plan: ModelPlan,
    num_blocks: int,
    max_model_len: int,
    openmp_wait: OpenMPWait,
    matchers: Matchers,
    adapters: ModelAdapters | None = None,
    *,
    recorder: Recorder | None = None,
    shapes: Sequence[GraphShape] = (),
) -> ModelRunner:
    """Return a runner over a new KV cache and new rows.

    With a `recorder` steps are captured; `shapes` are those with prompt chunks.
    """
    config = plan.config
    kv = _new_cache(plan, num_blocks)
    rows = SequenceRows(
        config.max_num_seqs,
        max_model_len,
        config.block_size,
        kv.strides,
        plan.device,
        plan.kernels,
        place_images=image_positions if has_image_axes(plan.model) else None,
    )
    is_alone = plan.ranks.count == 1
    forward = ModelForward(
        plan.model, adapters, rounds_tokens=plan.prepacks, may_compute_again=is_alone
    )
    programs, decodes = _programs(plan, forward, kv, rows, openmp_wait)
    graphs: StepGraphs | None = None
    if recorder is not None:
        graphs = StepGraphs(plan.model, rows, kv, plan.backend, recorder, shapes, adapters)
    # With graphs every step draws in the same way, captured or not.
    draw_tokens = partial(draw, kernels=plan.kernels, static=graphs is not None)
    return ModelRunner(
        plan.model,
        plan.kind,
        plan.backend,
        kv,
        rows,
        matchers,
        forward,
        draw_tokens,
        Encoder(plan.model, plan.pooler, plan.head, kv, plan.backend, forward, _trunk_cache(plan)),
        Explanations(rows, draw_tokens),
        programs=programs,
        decodes=decodes,
        graphs=graphs,
        adapters=adapters,
        poll=openmp_wait.poll,
        gauges=ProcessGauges(openmp_wait),
    )


def _programs(
    plan: ModelPlan,
    forward: ModelForward,
    kv: KVCache,
    rows: SequenceRows,
    openmp_wait: OpenMPWait,
) -> tuple[Forward | None, DrawDecodes | None]:
    """Return what records passes, and what records whole steps of decodes, if anything does."""
    # A recorded pass would leave out what ranks send each other.
    if plan.backend.name != "numba" or plan.ranks.count > 1:
        return None, None
    from engine.attention.numba import NumbaBackend
    from engine.runner.decode_programs import DecodePrograms
    from engine.runner.step_programs import StepPrograms

    assert isinstance(plan.backend, NumbaBackend)
    programs = StepPrograms(forward, plan.backend, rows.block_tables.shape[2], openmp_wait)
    if plan.kind == "encoder" or kv.states is not None:
        return programs, None
    return programs, DecodePrograms(plan.model, rows, kv, plan.backend, openmp_wait)


def _trunk_cache(plan: ModelPlan) -> KVCache | None:
    """Return the KV of the texts of one step, if a decoder's trunk reads them."""
    trunk = plan.trunk
    if trunk is None:
        return None
    size, dtype, device = plan.config.block_size, plan.dtype, plan.device
    if trunk.shares_blocks:
        return KVCache.of_one_step(trunk.kv_specs, trunk.num_blocks, size, dtype, device)
    return KVCache(trunk.kv_specs, trunk.num_blocks, size, dtype, device)


def _new_cache(plan: ModelPlan, num_blocks: int) -> KVCache:
    states: list[LayerStates] | None = None
    if plan.state_specs:
        states = new_states(plan.state_specs, plan.states.num_slots, plan.dtype, plan.device)
    size = plan.config.block_size
    return KVCache(plan.kv_specs, num_blocks, size, plan.kv_dtype, plan.device, states)


def make_matchers(plan: ModelPlan) -> Matchers:
    vocab_size = plan.model.config.vocab_size
    return Matchers(GrammarCompiler(plan.folder, vocab_size), vocab_size)


def recorder_of(plan: ModelPlan, given: Recorder | None) -> Recorder | None:
    """Return what captures steps: `given`, or a new one if the plan captures; None if none is."""
    if plan.kind == "encoder" or plan.config.enforce_eager:
        return None
    return CudaRecorder() if given is None and plan.captures_graphs else given
