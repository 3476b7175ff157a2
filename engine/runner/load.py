"""Load a model and make it ready: plan, weights, KV cache, warm-up and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.checkpoint.folder import model_name
from engine.checkpoint.identity import weights_identity
from engine.config import EngineConfig
from engine.device.facts import available_memory, emulates_bf16
from engine.device.limits import release_unused
from engine.device.openmp_wait import OpenMPWait
from engine.kernels.triton.chips import PLAIN, active, features_of, force
from engine.memory.batch_invariance import amx_note
from engine.memory.draft_plan import draft_kv_bytes, num_draft_blocks
from engine.memory.estimate import grammar_bytes, rows_bytes
from engine.memory.image_plan import embedding_bytes, encoder_bytes, pixel_bytes
from engine.memory.model_plan import ModelPlan
from engine.memory.profile import Capture, StepProfile, profile_steps, release_memory
from engine.memory.rank_plan import sum_blocks
from engine.memory.report import (
    ADAPTERS,
    measured_bytes,
    memory_entries,
    plan_memory,
    planned_bytes,
)
from engine.models.adapters import ModelAdapters
from engine.models.base import fold_sums
from engine.protocol.ready import MemoryEntry, Progress, Ready
from engine.runner.draft_model import DraftModel
from engine.runner.fill_weights import fill_weights
from engine.runner.kernel_progress import CompiledKernels
from engine.runner.make_runner import make_matchers, make_runner, recorder_of
from engine.runner.model_runner import ModelRunner
from engine.runner.pending_step import PendingStep
from engine.runner.ranks import (
    Connect,
    least_of_ranks,
    memory_of_others,
    refuse_ranks,
    sum_of_ranks,
)
from engine.runner.recorder import CudaRecorder, Recorder
from engine.runner.step_graphs import StepGraphs
from engine.runner.warm_up import warm_up
from engine.scheduling.step import Step

Report = Callable[[Progress], None]


class LoadedEngine(NamedTuple):
    """A model that is ready to serve."""

    plan: ModelPlan
    runner: ModelRunner
    facts: Ready  # what the server and its users see
    drafter: DraftModel | None = None  # of tokens that a step may check: a second model


def load_engine(
    config: EngineConfig,
    report: Report = lambda progress: None,
    recorder: Recorder | None = None,
    *,
    rank: int = 0,
    connect: Connect = refuse_ranks,
) -> LoadedEngine:
    """Load the model of `config`; `report` gets the progress. Raises ConfigError if that fails.

    `recorder` captures steps; None makes a CudaRecorder if steps become CUDA graphs. This process
    is number `rank` of those that share the model. `connect` is called if there are several.
    """
    start = time.monotonic()
    plan = _plan(config, rank)
    if plan.ranks.count > 1:
        connect(plan.ranks, plan.device)
        _start_rank_sums(plan)
    torch.set_num_threads(plan.threads)
    openmp_wait = OpenMPWait.for_threads(plan.device, plan.threads)
    compiled = CompiledKernels(plan, report)
    adapters = _make_adapters(plan, recorder)  # before the weights are packed
    with openmp_wait.asleep():
        loaded_bytes = fill_weights(plan, report)
    if adapters is not None:
        report(Progress("loading adapters", 0.0))
        adapters.load_sources()
    # Before the KV cache is sized: on a GPU that one gets the memory that is left.
    draft = _load_draft(plan, report, recorder, openmp_wait)
    profile = _profile(plan, report, openmp_wait, adapters)
    report(Progress("allocating the KV cache", 0.0))
    num_blocks, max_model_len = _blocks(plan, profile)
    runner = make_runner(
        plan,
        num_blocks,
        max_model_len,
        openmp_wait,
        make_matchers(plan),
        adapters,
        recorder=recorder_of(plan, recorder),
        shapes=plan.mixed_graph_shapes,
    )
    report(Progress("warming up", 0.0))
    vector_size = warm_up(runner)
    release_unused()
    _capture(runner, report)
    memory = memory_table(plan, runner, max_model_len, profile, draft)
    facts = _facts(
        plan,
        runner,
        max_model_len=max_model_len,
        weight_bytes=loaded_bytes,
        load_seconds=time.monotonic() - start,
        compiled=compiled,
        vector_size=vector_size,
        memory=memory,
    )
    return LoadedEngine(plan, runner, facts, _draft_model(plan, draft))


def _plan(config: EngineConfig, rank: int) -> ModelPlan:
    """Plan the model. Raises ConfigError if it does not fit, before anything is loaded."""
    plan = ModelPlan(config, rank)
    if config.kernels == "plain":
        force(PLAIN)  # in this process, from now on
    if rank == 0:
        plan_memory(plan)
    return plan


def _start_rank_sums(plan: ModelPlan) -> None:
    """Let the ranks add small tensors in one launch, if the chip does so."""
    blocks = sum_blocks(plan)
    if not blocks:
        return
    from engine.runner.rank_sums import start_one_shot_sums

    if start_one_shot_sums(plan.ranks, plan.device, blocks):
        fold_sums(plan.model, plan.ranks)


def _draft_model(plan: ModelPlan, draft: ModelRunner | None) -> DraftModel | None:
    if draft is None:
        return None
    shares = plan.config.enable_prefix_caching
    return DraftModel(draft, plan.max_num_batched_tokens, shares_prefixes=shares)


def _facts(
    plan: ModelPlan,
    runner: ModelRunner,
    *,
    max_model_len: int,
    weight_bytes: int,
    load_seconds: float,
    compiled: CompiledKernels,
    vector_size: int,
    memory: tuple[MemoryEntry, ...],
) -> Ready:
    config = plan.config
    drafting = config.speculative_model
    head = plan.head
    weight_bytes, kv_cache_bytes = sum_of_ranks(plan, weight_bytes, runner.kv.num_bytes)
    return Ready(
        architecture=plan.architecture,
        kind=plan.kind,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=str(plan.device),
        vocab_size=plan.model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=runner.kv.num_blocks,
        max_num_seqs=plan.config.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens - plan.image_tokens,
        image_tokens=plan.image_tokens,
        max_num_encoder_tokens=plan.max_num_encoder_tokens,
        context_cost=plan.context_cost,
        parameters=plan.num_parameters,
        weight_bytes=weight_bytes,
        kv_cache_bytes=kv_cache_bytes,
        load_seconds=load_seconds - compiled.blocked_seconds,
        compiled_kernels=compiled.count,
        compile_seconds=compiled.seconds,
        attention_backend=plan.attention_description,
        threads=plan.threads,
        kv_groups=runner.kv.groups,
        num_state_slots=plan.states.num_slots,
        state_bytes=plan.states.slot_bytes,
        start_token=plan.start_token,
        embedding_size=vector_size if head is None else 0,
        batch_variance=plan.batch_variance,
        amx_note=amx_note(plan.dtype, plan.kernels),
        emulates_bf16=emulates_bf16(plan.device, plan.dtype),
        memory=memory,
        other_ranks=memory_of_others(plan, memory),
        quantization=plan.quantization,
        weight_parts=() if plan.storage is None else plan.storage.suffixes(),
        weights=weights_identity(config, plan.folder),
        kv_cache_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        speculative_model=None if drafting is None else model_name(drafting),
        drafts_by_head=plan.prediction.module is not None,
        head_unused=plan.prediction.unused,
        num_labels=0 if head is None else head.num_labels,
        kernel_features=_kernel_features(plan),
        max_loras=0 if plan.adapters is None else plan.adapters.num_slots,
    )


def _kernel_features(plan: ModelPlan) -> tuple[str, ...] | None:
    """Return the names of the optimisations that are on; None without kernels that have some."""
    return active(features_of(plan.device)) if plan.kernels == "triton" else None


def _make_adapters(plan: ModelPlan, recorder: Recorder | None) -> ModelAdapters | None:
    """Give the layers room for adapters, if the model takes some.

    With a recorder the steps are captured, and read adapters of any slot.
    """
    if plan.adapters is None:
        return None
    return ModelAdapters(
        plan.model,
        plan.module,
        plan.adapters,
        kernels=plan.kernels,
        is_packed=plan.adapters.is_packed and recorder is None,
        exchange=plan.ranks.beside("adapters").texts,
    )


def _load_draft(
    plan: ModelPlan, report: Report, recorder: Recorder | None, openmp_wait: OpenMPWait
) -> ModelRunner | None:
    """Load the draft model, if there is one."""
    draft = plan.draft
    if draft is None:
        return None

    def report_draft(progress: Progress) -> None:
        report(Progress(f"draft model: {progress.stage}", progress.fraction))

    fill_weights(draft, report_draft)
    matchers = make_matchers(draft)
    matchers.close()  # drafts follow no grammar
    blocks = num_draft_blocks(draft)
    recorder = recorder_of(draft, recorder)
    runner = make_runner(
        draft, blocks, draft.max_model_len, openmp_wait, matchers, recorder=recorder
    )
    report_draft(Progress("warming up", 0.0))
    warm_up(runner)
    _capture(runner, report_draft)
    return runner


def _capture(runner: ModelRunner, report: Report) -> None:
    """Capture the first steps, if steps are replayed."""
    if runner.graphs is not None:
        report(Progress("capturing decode steps", 0.0))
        runner.graphs.capture_at_start()


def _profile(
    plan: ModelPlan, report: Report, openmp_wait: OpenMPWait, adapters: ModelAdapters | None
) -> StepProfile | None:
    """Measure the largest step of a GPU; None on a CPU, whose memory is only taken when used."""
    if plan.device.type != "cuda":
        return None
    report(Progress("measuring the largest step", 0.0))
    return measure_steps(plan, openmp_wait, adapters)


def measure_steps(
    plan: ModelPlan, openmp_wait: OpenMPWait, adapters: ModelAdapters | None = None
) -> StepProfile:
    """Measure the largest step and the graphs over one KV block, and throw both away."""
    profile = _profile_over_one_block(plan, openmp_wait, adapters)
    release_memory()
    return profile


def _profile_over_one_block(
    plan: ModelPlan, openmp_wait: OpenMPWait, adapters: ModelAdapters | None
) -> StepProfile:
    runner = make_runner(plan, 1, plan.max_model_len, openmp_wait, make_matchers(plan), adapters)
    warm_up(runner)

    def compute(step: Step) -> PendingStep:
        pending = runner.launch(step)
        pending.wait()
        return pending

    if not plan.captures_graphs:
        return profile_steps(plan, compute, None)

    def make_graphs() -> Capture:
        shapes, recorder = plan.mixed_graph_shapes, CudaRecorder()
        rows, kv = runner.rows, runner.kv
        return StepGraphs(plan.model, rows, kv, plan.backend, recorder, shapes, adapters).capture

    return profile_steps(plan, compute, make_graphs)


def _blocks(plan: ModelPlan, profile: StepProfile | None) -> tuple[int, int]:
    """Return the number of KV blocks that fit into all ranks, and the longest sequence."""
    reserved = _bytes_beside_kv_cache(plan, profile)
    free = plan.of_rank(available_memory(plan.device))
    num_blocks, max_model_len = plan.plan_blocks(free, reserved)
    num_blocks, max_model_len = least_of_ranks(plan, num_blocks, max_model_len)
    return num_blocks, max_model_len


def _bytes_beside_kv_cache(plan: ModelPlan, profile: StepProfile | None) -> int:
    """Bytes needed in addition to the KV cache and the loaded weights."""
    rows = rows_bytes(plan, plan.max_model_len) + plan.states.num_bytes
    rows += embedding_bytes(plan, plan.max_model_len)
    draft = plan.draft
    if profile is None:  # a CPU's steps are not measured, and its adapters come later
        # The draft model's KV cache is not taken yet: it takes memory as it fills.
        adapters = 0 if plan.adapters is None else plan.adapters.num_bytes
        draft_kv = 0 if draft is None else draft_kv_bytes(draft)
        rows += plan.lens_bytes + adapters + plan.program_bytes
        rows += pixel_bytes(plan, plan.max_model_len)
        return plan.step_bytes + rows + draft_kv + grammar_bytes(plan)
    step = max(profile.step_bytes, encoder_bytes(plan))  # units of encoding are not measured
    if draft is not None:  # its steps are not measured
        step = max(step, draft.step_bytes)
    return step + profile.graph_bytes + rows + plan.lens_bytes


def memory_table(
    plan: ModelPlan,
    runner: ModelRunner,
    max_model_len: int,
    profile: StepProfile | None,
    draft: ModelRunner | None,
) -> tuple[MemoryEntry, ...]:
    """Return the memory table: what was planned, and what the loaded model takes."""
    planned = planned_bytes(plan, runner.kv.num_blocks, max_model_len)
    rows, draft_kv = runner.rows.num_bytes, None
    if draft is not None:
        rows += draft.rows.num_bytes
        draft_kv = draft.kv
    measured = measured_bytes(plan, runner.kv, rows, profile, draft_kv)
    if runner.adapters is not None and runner.adapters.num_bytes:  # a CPU takes them as they come
        measured[ADAPTERS] = runner.adapters.num_bytes
    return memory_entries(planned, measured)
