"""ModelRunner: owns the model, the KV cache and the rows, and computes steps.

It knows no architecture: models are built from the registry, attention from AttentionSpecs.
`load.py` makes it ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.device.limits import resident_memory
from engine.device.transfer import to_device
from engine.memory.graph_shapes import GraphShape
from engine.models.adapters import LoadedAdapter, ModelAdapters
from engine.models.base import Model
from engine.protocol.ready import ModelKind
from engine.runner.batch import build_batch, rows_and_drafts
from engine.runner.encoder import build_encoder_batch, pool
from engine.runner.forward import (
    STEP_TOKENS_MULTIPLE,
    TEXT_TOKENS_MULTIPLE,
    Forward,
    ModelForward,
)
from engine.runner.pending_step import PendingKnown, PendingStep
from engine.runner.sequence_rows import SequenceRows
from engine.runner.step_graphs import StepGraphs
from engine.sampling.explain import PendingExplanation
from engine.sampling.logprobs import PendingLogprobs, prompt_logprobs
from engine.sampling.masks import LazyMasks, SequenceGrammars, TokenMasks
from engine.sampling.sampler import DrawParams, draw, sample
from engine.scheduling.step import (
    BlockCopy,
    EncoderInput,
    SampledToken,
    ScheduledSlice,
    Step,
)

log = logging.getLogger(__name__)

MEMORY_INTERVAL = 1.0  # seconds between two readings of this process's memory


class Contention(Protocol):
    """Whether other processes want the cores of this one: `engine/device/openmp_wait.py`."""

    @property
    def contended(self) -> bool: ...

    def poll(self, now: float) -> None:
        """Look again, at CLOCK_MONOTONIC seconds `now`."""

    def gauges(self) -> dict[str, float]: ...


class Followers(Protocol):
    """The other ranks, which compute the same steps: `engine/parallel/followers.py`."""

    def compute(self, step: Step, *, has_masks: bool) -> None:
        """Let them compute a step. If it `has_masks`, they wait for `mask`."""

    def mask(self, masks: TokenMasks) -> None: ...

    def capture(self) -> None:
        """Let them capture one more step graph."""

    def read_adapter(self, adapter: int, path: str) -> None:
        """Let them begin to read an adapter."""

    def place_adapter(self, adapter: int, slot: int) -> None:
        """Let them place it as this rank does."""


class ModelRunner:
    """A loaded model over a KV cache and rows. With `graphs` steps are replayed where they fit."""

    def __init__(
        self,
        model: Model,
        kind: ModelKind,
        backend: AttentionBackend,
        kv: KVCache,
        rows: SequenceRows,
        contention: Contention,
        matchers: SequenceGrammars,
        forward: ModelForward,
        *,
        programs: Forward | None,
        graphs: StepGraphs | None,
        adapters: ModelAdapters | None,
    ) -> None:
        """`programs` compute batches faster than `forward`, with the same bits, or call it.

        Without `adapters` the model takes none.
        """
        self.model, self.kind, self.backend = model, kind, backend
        self.kv, self.rows = kv, rows
        self.device = rows.device
        self.forward = forward
        self.programs = programs
        self.graphs = graphs
        self.matchers = matchers
        self.adapters = adapters
        self.followers: Followers | None = None  # None: this rank is alone, or follows another
        self._contention = contention
        self._can_capture = True
        self._resident, self._resident_at = 0, -MEMORY_INTERVAL
        # Each returns what computes the hidden states of a step in place of the model, or None.
        self.replacements: list[Callable[[Step], Forward | None]] = []

    def lead(self, followers: Followers) -> None:
        """Let other ranks compute the same steps from now on."""
        self.followers = followers

    # ---- one step ----------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Compute one step: write rows and blocks, run the model, sample, append the tokens."""
        launched_at = time.monotonic()
        self._contention.poll(launched_at)
        sampling = [s for s in step.slices if s.samples]
        masks = self.matchers.start(sampling)
        if self.followers is not None:
            self.followers.compute(step, has_masks=masks is not None)
        if step.copies:
            self._copy_blocks(step.copies)
        # Scrubbing takes two launches a layer, and large batches allocate in nearly every step.
        if step.scrub and self.backend.reads_masked_keys:
            self.kv.scrub(step.scrub)
        self.rows.apply(step)
        vectors = self._encode(step.encoder_inputs) if step.encoder_inputs else None
        tokens: torch.Tensor | None = None
        logprobs: PendingLogprobs | None = None
        known: Sequence[PendingKnown] = ()
        if step.slices:
            logits, is_captured, known = self._compute(step)
            if sampling:
                tokens, logprobs = self._sample(logits, sampling, masks, is_captured=is_captured)
        cut = masks.result().broken if masks else frozenset[int]()
        pending = PendingStep(step, launched_at, self.device, tokens, logprobs, vectors, known, cut)
        self.matchers.launched(pending)
        return pending

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.kv.copy_parts(
            [copy.source for copy in copies],
            [copy.target for copy in copies],
            [copy.tokens for copy in copies],
            transposed_keys=self.backend.transposes_keys,
        )

    def _compute(self, step: Step) -> tuple[torch.Tensor, bool, Sequence[PendingKnown]]:
        """Return logits [R, V] of the slices that sample, whether a graph left them, and what
        slices want of known tokens."""
        found = (forward_of(step) for forward_of in self.replacements)
        changed = next((forward for forward in found if forward), None)
        shape = None if changed else self._captured_shape(step)
        if self.graphs is not None and shape is not None:
            return self.graphs.compute(shape, step.slices), True, []
        logits, known = self._compute_eagerly(step, changed or self._forward)
        return logits, False, known

    def _compute_eagerly(
        self, step: Step, forward: Forward
    ) -> tuple[torch.Tensor, Sequence[PendingKnown]]:
        """Compute any step, kernel by kernel."""
        batch = build_batch(step, self.rows, self.kv, self.backend, self.adapters)
        hidden = forward(batch)
        known: Sequence[PendingKnown] = self._prompt_logprobs(step.slices, hidden)
        if self.rows.explain and step.prefills:
            known = [*known, *self._explained(step.slices, hidden)]
        return self.logits(hidden.index_select(0, batch.logit_index)), known

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [T, hidden] of a batch, and of padding behind it."""
        # Threads of a program spin while they wait, which takes cores that others need.
        if self.programs is not None and not self._contention.contended:
            return self.programs(batch)
        return self.forward(batch)

    def _captured_shape(self, step: Step) -> GraphShape | None:
        """Return the shape of the graph that computes this step, or None if none does."""
        if self.graphs is None:
            return None
        explain = self.rows.explain
        if step.prefills and any(s.num_prompt_logprobs or s.row in explain for s in step.slices):
            return None  # they need more logits than a graph leaves
        shape = self.graphs.shape_for(step)
        return shape if shape is not None and self.graphs.is_captured(shape) else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [L, V] for the hidden states [L, hidden] of some tokens."""
        count = len(hidden)
        missing = self.forward.round_up(count, STEP_TOKENS_MULTIPLE) - count
        if missing:
            hidden = F.pad(hidden, (0, 0, 0, missing))
        return self.model.logits(hidden)[:count]

    def _sample(
        self,
        logits: torch.Tensor,
        slices: Sequence[ScheduledSlice],
        masks: LazyMasks | None,
        *,
        is_captured: bool,
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
            row_ids, ahead = to_device(rows_and_drafts(slices), self.device)
            params = rows.draw_params(row_ids, ahead)
            tokens = self._draw(logits, params)
            rows.append(row_ids, params, ahead, tokens)
            return tokens

        if masks and self.followers is not None:
            self.followers.mask(masks.result())
        on_device = masks.result().on(self.device) if masks else None
        return sample(logits, rows.special_params(slices), history, draw_and_append, on_device)

    def _draw(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        return draw(logits, params, self.rows.kernels, static=self.graphs is not None)

    def _explained(
        self, slices: Sequence[ScheduledSlice], hidden: torch.Tensor
    ) -> list[PendingExplanation]:
        """Return, for each slice of a past answer, how the tokens behind its own were drawn."""
        found = []
        end = 0
        for s in slices:
            end += s.count
            explain = self.rows.explain.get(s.row)
            if explain is None:
                continue
            first_row = explain.first_row(self.rows.prompt_length[s.row])
            num_skipped = max(0, first_row - s.start)  # tokens before the answer
            if num_skipped >= s.count:
                continue
            tokens = self.rows.tokens[s.row, : s.start + s.count]
            index = s.start + num_skipped - first_row
            pending = PendingExplanation(s.id, explain, tokens, first_row + 1, index)
            logits = self.logits(hidden[end - s.count + num_skipped : end])
            indices = range(index, index + len(logits))
            allowed = self.matchers.replay(s.id, explain.answer, indices)
            pending.launch(logits, self._draw, allowed)
            found.append(pending)
        return found

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
                found.append(prompt_logprobs(states, tokens, count, self.logits))
            first += s.count
        return found

    def _encode(self, inputs: Sequence[EncoderInput]) -> torch.Tensor | None:
        """Encode encoder prompts, whose KV is written, or texts, whose vectors are returned."""
        batch = build_encoder_batch(inputs, self.kv, self.backend, self.device)
        batch = batch.padded(self.forward.round_up(batch.num_tokens, TEXT_TOKENS_MULTIPLE))
        hidden = self.model.encode(batch)[: batch.num_tokens]
        return pool(hidden, inputs) if inputs[0].pooling else None

    def results(self, pending: PendingStep) -> list[SampledToken]:
        """Wait for the tokens of a step, and let the grammars compute what may follow them."""
        sampled = pending.wait()
        self.matchers.accept(pending.step, sampled)
        return sampled

    @property
    def can_capture(self) -> bool:
        """Whether a step graph is left to capture."""
        return self.graphs is not None and self._can_capture

    def capture_when_idle(self) -> bool:
        """Capture one more step graph. Returns False if there is nothing left to capture.

        Raises torch.OutOfMemoryError if there are other ranks: they have captured it, and would
        compute the step with other shapes.
        """
        if self.graphs is None or not self._can_capture:
            return False
        if self.followers is not None:
            self.followers.capture()
        try:
            self._can_capture = self.graphs.capture_next()
        except torch.OutOfMemoryError as error:
            if not self.forward.may_compute_again:
                raise
            # Another program has taken the memory. Steps without a graph run kernel by kernel.
            log.warning("no memory to capture more steps: %s", error)
            self._can_capture = False
        return self._can_capture

    def read_adapter(self, adapter: int, path: str) -> Future[LoadedAdapter]:
        """Begin to read an adapter in a thread, in all ranks. `place_adapter` must follow."""
        assert self.adapters is not None
        if self.followers is not None:
            self.followers.read_adapter(adapter, path)
        return self.adapters.read(adapter, path)

    def place_adapter(self, adapter: int, slot: int) -> None:
        """Place an adapter as in ModelAdapters, in all ranks between the same two steps."""
        assert self.adapters is not None
        if self.followers is not None:
            self.followers.place_adapter(adapter, slot)
        self.adapters.place(adapter, slot)

    def gauges(self) -> dict[str, float]:
        """Return measurements of this process by the names that /metrics exports."""
        now = time.monotonic()
        if now - self._resident_at > MEMORY_INTERVAL:
            self._resident, self._resident_at = resident_memory(), now
        return {"engine_resident_memory_bytes": self._resident, **self._contention.gauges()}
