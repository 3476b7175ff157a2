"""ModelRunner: owns the model, the KV cache and the rows; computes steps. Knows no architecture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.memory.profile import (
    Reserve,
    kept_by,
    largest_step,
    peak_of,
    release,
    scoring_step,
)
from engine.ops.kernels import select_kernels, use_kernels
from engine.protocol import MemoryEntry, Progress, Ready, SamplingParams
from engine.runner.batch import build_batch
from engine.runner.encoder import build_encoder_batch, pool
from engine.runner.graphs import DecodeGraphs, batch_sizes
from engine.runner.mixed import MixedGraphs
from engine.runner.pending_step import PendingStep
from engine.runner.recorder import CudaRecorder, Recorder
from engine.sampling.draw import draw
from engine.sampling.logprobs import PendingLogprobs, score
from engine.sampling.sampler import sample
from engine.scheduling.step import EncoderInput, NewBlocks, NewRow, ScheduledSlice, Step

log = logging.getLogger(__name__)

# oneDNN makes a kernel for each linear's shape and number of rows, in milliseconds where these are
# many, and keeps 512 (engine/client/subprocess.py), of half a megabyte each. So more rows than a
# few come in multiples: of 16 for texts, which together have any number of tokens; of 8 for a
# decoder's steps, as without AMX every row costs.
FEW_ROWS, TEXT_ROW_STEP, ROW_STEP = 32, 16, 8


class Results(NamedTuple):
    """What a step's slices give: tokens [samples], their logprobs, and the scores of each that has
    any."""

    tokens: torch.Tensor | None = None
    logprobs: PendingLogprobs | None = None
    scores: Sequence[PendingLogprobs] = ()


class ModelRunner:
    """A loaded model, ready to compute steps. Raises ConfigError where it cannot be served."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[Progress], None] = lambda p: None,
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder` records steps; by default there is one on CUDA."""
        began = time.monotonic()
        plan = ModelPlan(config)
        self.config, self.plan = config, plan
        self.model, self.backend, self.kind = plan.model, plan.backend, plan.kind
        self.device, self.dtype = plan.device, plan.dtype
        self.kernels = select_kernels(self.device, self.backend.name)
        self.max_num_encoder_tokens = plan.max_num_encoder_tokens
        self.threads = config.threads or cpu_count()
        torch.set_num_threads(self.threads)
        self.openmp_wait = OpenMPWait.for_threads(self.device, self.threads)
        plan.check_weights()
        if config.load_format == "dummy":
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
        use_kernels(plan.module, self.kernels)
        self.weight_bytes = sum(p.nbytes for p in plan.module.parameters())
        if plan.packs:
            progress(Progress("prepacking weights", 0.0))
            _prepack(plan.module)
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._can_capture = True
        self.reserve = Reserve()
        if self.device.type == "cuda":
            progress(Progress("measuring the largest step", 0.0))
            self.reserve = self._measure()
        progress(Progress("allocating the KV cache", 0.0))
        self._allocate(*plan.plan_blocks(available_memory(self.device), self._reserved))
        progress(Progress("warming up", 0.0))
        self.embedding_size = self._warm_up()
        if recorder is None and plan.captures:
            recorder = CudaRecorder()
        if recorder and self.kind != "encoder" and not config.enforce_eager:
            progress(Progress("capturing decode steps", 0.0))
            self.graphs = self._decode_graphs(recorder)
            self.graphs.capture_first()
            self.mixed = self._mixed_graphs(recorder, self.graphs)
        self.load_seconds = time.monotonic() - began

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Compute one step: write rows and blocks, run the model, sample, append the tokens."""
        launched_at = time.monotonic()
        # Two launches a layer, and large batches take a block in nearly every step.
        if step.scrub and self.backend.reads_masked_keys:
            self.kv.scrub(step.scrub)
        self.rows.apply(step.new_rows, step.new_blocks)
        vectors = self._encode(step.encoder_inputs) if step.encoder_inputs else None
        results = Results()
        if step.slices:
            replayed = self._replay(step, self.graphs) if self.graphs else None
            results = replayed or self._compute(step)
        tokens, logprobs, scores = results
        return PendingStep(step, launched_at, tokens, logprobs, vectors, scores)

    def _replay(self, step: Step, graphs: DecodeGraphs) -> Results | None:
        """Tokens of a step of which there is a recording; None where there is none."""
        sampling: Sequence[ScheduledSlice] = step.slices
        if step.is_decode:
            rows = [s.row for s in sampling]
            if not graphs.size_for(len(rows)):
                return None
            logits = graphs.compute(rows)
        else:
            shape = self.mixed.shape_for(step.slices) if self.mixed else None
            if not (self.mixed and shape and self.mixed.has(shape)):
                return None
            if any(s.scores for s in step.slices):
                return None  # it wants more logits than a recording leaves
            logits = self.mixed.compute(shape, step.slices)
            sampling = [s for s in sampling if s.samples]
            rows = [s.row for s in sampling]
            if not rows:
                return Results()
        if all(map(self.rows.plain.__getitem__, rows)):
            return Results(graphs.draw(len(rows)))
        return Results(*self._sample(logits, sampling, graphs.row_ids[: len(rows)]))

    def _compute(self, step: Step) -> Results:
        """Tokens of any step, kernel by kernel."""
        batch = build_batch(step, self.rows, self.kv, self.backend)
        hidden = self.model.forward(batch.padded(self._rounded(batch.num_tokens, ROW_STEP)))
        sampling = [s for s in step.slices if s.samples]
        scores = self._score(step.slices, hidden)
        if not sampling:
            return Results(scores=scores)
        logits = self._logits(hidden.index_select(0, batch.logit_index))
        (row_ids,) = to_device([[s.row for s in sampling]], self.device)
        return Results(*self._sample(logits, sampling, row_ids), scores)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, V] for the hidden states [L, hidden] of some tokens."""
        missing = self._rounded(len(hidden), ROW_STEP) - len(hidden)
        padded = F.pad(hidden, (0, 0, 0, missing)) if missing else hidden
        return self.model.logits(padded)[: len(hidden)]

    def _score(
        self, slices: Sequence[ScheduledSlice], hidden: torch.Tensor
    ) -> list[PendingLogprobs]:
        """For each slice that scores, the logprobs of the tokens behind its first ones."""
        found, first = [], 0
        for s in slices:
            if s.scores:
                tokens = self.rows.tokens[s.row, s.start + 1 : s.start + 1 + s.scores]
                count = self.rows.params[s.row].prompt_logprobs
                found.append(score(hidden[first : first + s.scores], tokens, count, self._logits))
            first += s.count
        return found

    def _sample(
        self, logits: torch.Tensor, slices: Sequence[ScheduledSlice], row_ids: torch.Tensor
    ) -> tuple[torch.Tensor, PendingLogprobs | None]:
        """Tokens of `slices`, whose rows are `row_ids` [R], for logits [R, V], and append them.

        Where decodes are captured a row draws alike in every step, whatever the others in it want.
        """
        captured = self.device.type == "cuda" or self.graphs is not None
        params = self.rows.draw_params(row_ids) if captured else None
        logprobs = None
        if params and all(self.rows.plain[s.row] for s in slices):
            tokens = draw(logits.float(), params, self.kernels)
        else:
            rows = [self.rows.sampling_row(s.row, s.start + s.count) for s in slices]
            tokens, logprobs = sample(logits, rows, params, self.kernels)
        self.rows.append(row_ids, tokens)
        return tokens, logprobs

    def capture_when_idle(self) -> bool:
        """Use an idle moment to capture one more step; False where nothing is left to do."""
        if not self._can_capture:
            return False
        try:
            if self.graphs and self.graphs.capture_next():
                return True
            self._can_capture = self.mixed is not None and self.mixed.capture_next()
        except torch.OutOfMemoryError as error:
            # Others have taken what was foreseen. A step without a recording runs kernel by kernel.
            log.warning("no memory to capture more steps: %s", error)
            self._can_capture = False
        return self._can_capture

    def _encode(self, encoder_inputs: Sequence[EncoderInput]) -> torch.Tensor | None:
        """Sources, whose KV is written, and texts, whose vectors are returned."""
        batch = build_encoder_batch(encoder_inputs, self.kv, self.backend, self.device)
        batch = batch.padded(self._rounded(batch.num_tokens, TEXT_ROW_STEP))
        hidden = self.model.encode(batch)[: batch.num_tokens]
        return pool(hidden, encoder_inputs) if encoder_inputs[0].pooling else None

    def _rounded(self, rows: int, step: int) -> int:
        """With how many rows oneDNN shall meet so many."""
        few = rows <= FEW_ROWS or not self.plan.packs
        return rows if few else -(-rows // step) * step

    def _allocate(self, blocks: int, max_model_len: int) -> None:
        config = self.config
        self.max_model_len = max_model_len
        self.kv = KVCache(self.plan.specs, blocks, config.block_size, self.dtype, self.device)
        self.rows = self.plan.rows(max_model_len, self.device, self.kernels)

    def _decode_graphs(self, recorder: Recorder) -> DecodeGraphs:
        return DecodeGraphs(self.model, self.rows, self.kv, self.backend, recorder)

    def _mixed_graphs(self, recorder: Recorder, graphs: DecodeGraphs) -> MixedGraphs | None:
        """None where prompts are read along with sources."""
        if any(group.is_cross for group in self.kv.groups):
            return None
        tokens = self.plan.max_num_batched_tokens
        return MixedGraphs(self.model, self.rows, self.kv, self.backend, recorder, graphs, tokens)

    def _measure(self) -> Reserve:
        """Run the largest step, and record two decodes and two mixed steps, over one block of KV.

        A recording holds the addresses of its KV cache, and the KV cache is to get what recordings
        leave: so these are thrown away again. The second tells what each further one takes.
        """
        self._allocate(1, self.plan.max_model_len)
        try:
            self._warm_up()
            step = peak_of(lambda: self.launch(largest_step(self.plan)).wait())
            if self.kind == "decoder":
                scoring = scoring_step(self.plan)
                step = max(step, peak_of(lambda: self.launch(scoring).scores()))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "The largest step does not fit into what the weights leave of the GPU. Use less of "
                "--max-num-batched-tokens, --max-num-encoder-tokens, --max-num-seqs or "
                "--max-model-len."
            ) from error
        graphs = 0
        if self.plan.captures:
            probe: list[DecodeGraphs] = []
            recorder = CudaRecorder()
            graphs = kept_by(lambda: probe.append(self._decode_graphs(recorder)))
            graphs += kept_by(probe[0].capture_next)
            further = len(batch_sizes(self.config.max_num_seqs)) - 1
            graphs += further * kept_by(probe[0].capture_next)
            if mixed := self._mixed_graphs(recorder, probe[0]):
                # Filled up it has more tokens than any step that is not recorded.
                peaks: list[int] = []
                graphs += kept_by(lambda: peaks.append(peak_of(mixed.capture_next)))
                step = max(step, *peaks)
                graphs += (len(mixed.shapes) - 1) * kept_by(mixed.capture_next)
            del probe, recorder, mixed
        del self.kv, self.rows
        release()
        return Reserve(step, graphs)

    @property
    def _reserved(self) -> int:
        """Bytes needed beside the KV cache and what is loaded already; on a CPU nobody counts."""
        if self.device.type == "cpu":
            return 0
        rows = self.plan.rows(self.plan.max_model_len, torch.device("meta")).num_bytes
        return self.reserve.step + self.reserve.graphs + rows

    def ledger(self) -> tuple[MemoryEntry, ...]:
        """What was foreseen to take memory, and what takes it."""
        module = self.plan.module
        packed = [getattr(m, "_packed", None) for m in module.modules()]
        found = {
            "weights": sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            "packed weights": sum(p.nbytes for p in packed if p is not None),
            "rows": self.rows.num_bytes,
            "KV cache": self.kv.num_bytes,
        }
        if self.device.type == "cuda":
            found["largest step"], found["graphs"] = self.reserve.step, self.reserve.graphs
        taken = self.plan.taken(self.kv.num_blocks, self.max_model_len)
        return tuple(MemoryEntry(what, size, found.get(what)) for what, size in taken.items())

    def _warm_up(self) -> int:
        """One token through everything, so that the first request pays for nothing but itself.

        Returns the length of an encoder's vectors.
        """
        if self.kind == "encoder":
            step = Step(encoder_inputs=(EncoderInput(0, (0,), "mean"),))
            (output,) = self.launch(step).embeddings()
            return len(output.vector) // 4  # fp32
        row = NewRow(0, (0,), 1, SamplingParams(max_tokens=1, temperature=1.0), encoder_length=1)
        slice_ = ScheduledSlice(id=0, epoch=0, row=0, start=0, count=1, samples=True)
        blocks = tuple(NewBlocks(0, group, 0, (1,)) for group in range(len(self.kv.groups)))
        source = tuple((n, (1,)) for n, group in enumerate(self.kv.groups) if group.is_cross)
        encoder_inputs = (EncoderInput(0, (0,), blocks=source),) if source else ()
        self.launch(Step((slice_,), (row,), blocks, encoder_inputs=encoder_inputs)).wait()
        self.kv.scrub([1])
        return 0

    def facts(self) -> Ready:
        """What the server and its users are told."""
        return Ready(
            architecture=self.plan.architecture,
            kind=self.kind,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
            parameters=self.plan.parameters,
            weight_bytes=self.weight_bytes,
            kv_cache_bytes=self.kv.num_bytes,
            load_seconds=self.load_seconds,
            attention_backend=self.plan.attention,
            threads=self.threads,
            kv_groups=self.kv.groups,
            start_token=self.plan.start_token,
            embedding_size=self.embedding_size,
            batch_variance=batch_variance_of(
                self.device, self.dtype, packed=self.plan.packs, threads=self.threads
            ),
            emulates_bf16=emulates_bf16(self.device, self.dtype),
            memory=self.ledger(),
        )


def _prepack(model: nn.Module) -> None:
    for module in model.modules():
        if callable(prepack := getattr(module, "prepack", None)):
            prepack()
