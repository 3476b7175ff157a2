"""ModelRunner: owns the model, the KV cache and the rows, and computes steps.

It knows no architecture: models are built from the registry, attention from AttentionSpecs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.kv_cache import KVCache
from engine.checkpoint.loader import load_weights
from engine.checkpoint.random import random_weights
from engine.config import EngineConfig
from engine.device.facts import available_memory, batch_variance_of, emulates_bf16
from engine.device.limits import cpu_count
from engine.device.openmp_wait import OpenMPWait
from engine.device.transfer import to_device
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.memory.estimate import rows_bytes
from engine.memory.graph_shapes import GraphShape
from engine.memory.model_plan import ModelPlan
from engine.memory.profile import StepProfile, profile_steps, release_memory
from engine.memory.report import measured_bytes, memory_entries, planned_bytes
from engine.ops.dispatch import compiled_kernels
from engine.ops.kernels import use_kernels
from engine.protocol import MemoryEntry, Progress, Ready, SamplingParams
from engine.runner.batch import build_batch
from engine.runner.encoder import build_encoder_batch, pool
from engine.runner.pending_step import PendingStep
from engine.runner.recorder import CudaRecorder, Recorder
from engine.runner.sequence_rows import SequenceRows
from engine.runner.step_graphs import StepGraphs
from engine.sampling.logprobs import PendingLogprobs, prompt_logprobs
from engine.sampling.sampler import draw, sample
from engine.scheduling.step import EncoderInput, NewBlocks, NewRow, ScheduledSlice, Step

log = logging.getLogger(__name__)

# oneDNN compiles a kernel for each shape of a linear and each number of tokens, and keeps 512 of
# half a megabyte each (engine/client/subprocess.py). So token counts above a few are rounded up to
# a multiple: of 16 for texts, which add up to any number; of 8 for decoder steps, where every token
# costs without AMX.
FEW_TOKENS, TEXT_TOKENS_MULTIPLE, STEP_TOKENS_MULTIPLE = 32, 16, 8


class ModelRunner:
    """A loaded model, ready to compute steps. Raises ConfigError if it cannot be served."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[Progress], None] = lambda progress: None,
        recorder: Recorder | None = None,
    ) -> None:
        """Load the model. `recorder` captures steps; None makes a CudaRecorder on CUDA."""
        start = time.monotonic()
        self.config = config
        self.plan = plan = ModelPlan(config)
        self.model, self.backend, self.kind = plan.model, plan.backend, plan.kind
        self.device, self.dtype = plan.device, plan.dtype
        self.max_num_encoder_tokens = plan.max_num_encoder_tokens
        self.threads = config.threads or cpu_count()
        torch.set_num_threads(self.threads)
        self.openmp_wait = OpenMPWait.for_threads(self.device, self.threads)
        self._load_weights(progress)
        self.graphs: StepGraphs | None = None
        self.profile: StepProfile | None = None
        if self.device.type == "cuda":
            progress(Progress("measuring the largest step", 0.0))
            self.profile = self._profile_steps()
        progress(Progress("allocating the KV cache", 0.0))
        free = available_memory(self.device)
        self._allocate(*plan.plan_blocks(free, self._bytes_beside_kv_cache()))
        progress(Progress("warming up", 0.0))
        self.embedding_size = self._warm_up()
        if recorder is None and plan.captures_graphs:
            recorder = CudaRecorder()
        if recorder and self.kind != "encoder" and not config.enforce_eager:
            progress(Progress("capturing decode steps", 0.0))
            self.graphs = self._make_graphs(recorder)
            self.graphs.capture_at_start()
        self._can_capture = self.graphs is not None
        self.load_seconds = time.monotonic() - start

    # ---- one step ----------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Compute one step: write rows and blocks, run the model, sample, append the tokens."""
        with compiled_kernels(self.plan.kernels == "numba"):
            return self._launch(step)

    def _launch(self, step: Step) -> PendingStep:
        launched_at = time.monotonic()
        self.openmp_wait.poll(launched_at)
        # Scrubbing takes two launches a layer, and large batches allocate in nearly every step.
        if step.scrub and self.backend.reads_masked_keys:
            self.kv.scrub(step.scrub)
        self.rows.apply(step.new_rows, step.new_blocks)
        vectors = self._encode(step.encoder_inputs) if step.encoder_inputs else None
        tokens: torch.Tensor | None = None
        logprobs: PendingLogprobs | None = None
        prompt: list[PendingLogprobs] = []
        if step.slices:
            logits, is_captured, prompt = self._compute(step)
            sampling = [s for s in step.slices if s.samples]
            if sampling:
                tokens, logprobs = self._sample(logits, sampling, is_captured=is_captured)
        return PendingStep(step, launched_at, tokens, logprobs, vectors, prompt)

    def _compute(self, step: Step) -> tuple[torch.Tensor, bool, list[PendingLogprobs]]:
        """Return logits [R, V] of the slices that sample, whether a graph left them, and the prompt
        logprobs of the slices that want some."""
        shape = self._captured_shape(step)
        if self.graphs is not None and shape is not None:
            return self.graphs.compute(shape, step.slices), True, []
        logits, prompt = self._compute_eagerly(step)
        return logits, False, prompt

    def _compute_eagerly(self, step: Step) -> tuple[torch.Tensor, list[PendingLogprobs]]:
        """Compute any step, kernel by kernel."""
        batch = build_batch(step, self.rows, self.kv, self.backend)
        padded = self._round_up(batch.num_tokens, STEP_TOKENS_MULTIPLE)
        hidden = self.model.forward(batch.padded(padded))
        prompt = self._prompt_logprobs(step.slices, hidden)
        return self._logits(hidden.index_select(0, batch.logit_index)), prompt

    def _captured_shape(self, step: Step) -> GraphShape | None:
        """Return the shape of the graph that computes this step, or None if none does."""
        if self.graphs is None or any(s.num_prompt_logprobs for s in step.slices):
            return None  # prompt logprobs need more logits than a graph leaves
        shape = self.graphs.shape_for(step)
        return shape if shape is not None and self.graphs.is_captured(shape) else None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [L, V] for the hidden states [L, hidden] of some tokens."""
        count = len(hidden)
        missing = self._round_up(count, STEP_TOKENS_MULTIPLE) - count
        if missing:
            hidden = F.pad(hidden, (0, 0, 0, missing))
        return self.model.logits(hidden)[:count]

    def _sample(
        self, logits: torch.Tensor, slices: Sequence[ScheduledSlice], *, is_captured: bool
    ) -> tuple[torch.Tensor, PendingLogprobs | None]:
        """Sample a token for each of `slices` from logits [R, V], and append it to its row.

        With graphs every step draws on the device alone, so that a row's token does not depend on
        whether its step was captured.
        """
        rows, graphs = self.rows, self.graphs

        def history(index: int) -> tuple[torch.Tensor, int]:
            s = slices[index]
            return rows.tokens[s.row, : s.start + s.count], rows.prompt_length[s.row]

        def draw_and_append(logits: torch.Tensor) -> torch.Tensor:
            if graphs is not None and is_captured:
                return graphs.draw(len(slices))
            (row_ids,) = to_device([[s.row for s in slices]], self.device)
            params = rows.draw_params(row_ids)
            tokens = draw(logits, params, self.plan.kernels, static=graphs is not None)
            rows.append(row_ids, tokens)
            return tokens

        return sample(logits, rows.special_params(slices), history, draw_and_append)

    def _prompt_logprobs(
        self, slices: Sequence[ScheduledSlice], hidden: torch.Tensor
    ) -> list[PendingLogprobs]:
        """Return, for each slice that wants them, the logprobs of the tokens behind its first."""
        found = []
        first = 0
        for s in slices:
            if s.num_prompt_logprobs:
                states = hidden[first : first + s.num_prompt_logprobs]
                tokens = self.rows.tokens[s.row, s.start + 1 :][: s.num_prompt_logprobs]
                count = self.rows.params[s.row].prompt_logprobs
                found.append(prompt_logprobs(states, tokens, count, self._logits))
            first += s.count
        return found

    def _encode(self, inputs: Sequence[EncoderInput]) -> torch.Tensor | None:
        """Encode encoder prompts, whose KV is written, or texts, whose vectors are returned."""
        batch = build_encoder_batch(inputs, self.kv, self.backend, self.device)
        batch = batch.padded(self._round_up(batch.num_tokens, TEXT_TOKENS_MULTIPLE))
        hidden = self.model.encode(batch)[: batch.num_tokens]
        return pool(hidden, inputs) if inputs[0].pooling else None

    def _round_up(self, tokens: int, multiple: int) -> int:
        """Round a token count up to a multiple, so that oneDNN compiles fewer kernels."""
        if tokens <= FEW_TOKENS or not self.plan.prepacks:
            return tokens
        return -(-tokens // multiple) * multiple

    def capture_when_idle(self) -> bool:
        """Capture one more step graph. Returns False if there is nothing left to capture."""
        if self.graphs is None or not self._can_capture:
            return False
        try:
            self._can_capture = self.graphs.capture_next()
        except torch.OutOfMemoryError as error:
            # Another program has taken the memory. Steps without a graph run kernel by kernel.
            log.warning("no memory to capture more steps: %s", error)
            self._can_capture = False
        return self._can_capture

    # ---- start -------------------------------------------------------------------------------

    def _load_weights(self, progress: Callable[[Progress], None]) -> None:
        plan = self.plan
        plan.check_weights()
        if self.config.load_format == "dummy":
            random_weights(plan.module, dtype=self.dtype, device=self.device)
        else:
            load_weights(
                plan.module,
                self.model.weight_map(),
                plan.folder,
                dtype=self.dtype,
                device=self.device,
                progress=lambda fraction: progress(Progress("loading weights", fraction)),
            )
        self.weight_bytes = sum(p.nbytes for p in plan.module.parameters())
        use_kernels(plan.module, plan.kernels)
        if plan.prepacks:
            progress(Progress("prepacking weights", 0.0))
            _prepack(plan.module, is_compiled=plan.kernels == "numba")

    def _allocate(self, num_blocks: int, max_model_len: int) -> None:
        plan, config = self.plan, self.config
        self.max_model_len = max_model_len
        self.kv = KVCache(plan.kv_specs, num_blocks, config.block_size, self.dtype, self.device)
        self.rows = SequenceRows(
            config.max_num_seqs,
            max_model_len,
            config.block_size,
            len(plan.kv_groups),
            self.device,
            plan.kernels,
        )

    def _make_graphs(self, recorder: Recorder) -> StepGraphs:
        shapes = self.plan.mixed_graph_shapes
        return StepGraphs(self.model, self.rows, self.kv, self.backend, recorder, shapes)

    def _profile_steps(self) -> StepProfile:
        """Measure the largest step and the graphs over one KV block, and throw both away."""
        self._allocate(1, self.plan.max_model_len)
        self._warm_up()
        capturing = None
        if self.plan.captures_graphs:
            recorder = CudaRecorder()
            capturing = lambda: self._make_graphs(recorder).capture  # noqa: E731
        profile = profile_steps(self.plan, self._run_to_end, capturing)
        del self.kv, self.rows, capturing
        release_memory()
        return profile

    def _run_to_end(self, step: Step) -> PendingStep:
        pending = self.launch(step)
        pending.wait()
        return pending

    def _bytes_beside_kv_cache(self) -> int:
        """Bytes needed beside the KV cache and the loaded weights. Not counted on a CPU."""
        if self.profile is None:
            return 0
        rows = rows_bytes(self.plan, self.plan.max_model_len)
        return self.profile.step_bytes + self.profile.graph_bytes + rows

    def _warm_up(self) -> int:
        """Compute one token, so that the first request does not pay for one-time costs.

        Returns the length of an encoder's vectors.
        """
        if self.kind == "encoder":
            step = Step(encoder_inputs=(EncoderInput(0, (0,), "mean"),))
            (output,) = self.launch(step).embeddings()
            return len(output.vector) // 4  # fp32
        params = SamplingParams(max_tokens=1, temperature=1.0)
        row = NewRow(0, (0,), 1, params, encoder_length=1)
        decode = ScheduledSlice(id=0, epoch=0, row=0, start=0, count=1, samples=True)
        groups = self.kv.groups
        blocks = tuple(NewBlocks(0, number, 0, (1,)) for number in range(len(groups)))
        cross = tuple((number, (1,)) for number, group in enumerate(groups) if group.is_cross)
        inputs = (EncoderInput(0, (0,), blocks=cross),) if cross else ()
        self.launch(Step((decode,), (row,), blocks, encoder_inputs=inputs)).wait()
        self.kv.scrub([1])
        return 0

    # ---- facts -------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return measurements of the last steps by the names that /metrics exports."""
        return self.openmp_wait.gauges()

    def memory(self) -> tuple[MemoryEntry, ...]:
        """Return the memory table: what was planned, and what the loaded model takes."""
        planned = planned_bytes(self.plan, self.kv.num_blocks, self.max_model_len)
        measured = measured_bytes(self.plan, self.kv, self.rows.num_bytes, self.profile)
        return memory_entries(planned, measured)

    def facts(self) -> Ready:
        """Return what the server and its users see of the loaded model."""
        plan = self.plan
        return Ready(
            architecture=plan.architecture,
            kind=self.kind,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            parameters=plan.num_parameters,
            weight_bytes=self.weight_bytes,
            kv_cache_bytes=self.kv.num_bytes,
            load_seconds=self.load_seconds,
            attention_backend=plan.attention_description,
            threads=self.threads,
            kv_groups=self.kv.groups,
            start_token=plan.start_token,
            embedding_size=self.embedding_size,
            batch_variance=batch_variance_of(
                self.device, self.dtype, packed=plan.prepacks, threads=self.threads
            ),
            emulates_bf16=emulates_bf16(self.device, self.dtype),
            memory=self.memory(),
        )


def _prepack(model: nn.Module, *, is_compiled: bool) -> None:
    for layer in model.modules():
        if isinstance(layer, Linear | LMHead):
            layer.prepack(compiled=is_compiled)
