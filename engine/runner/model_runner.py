"""ModelRunner: owns the model, the KV cache and the rows, and computes steps.

It knows no architecture: models are built from the registry, attention from AttentionSpecs.
`load.py` makes it ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import KVCache, PartCopies, write_parts
from engine.device.transfer import to_device
from engine.models.adapters import LoadedAdapter, ModelAdapters
from engine.models.base import Model
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image, SamplingParams
from engine.protocol.ready import ModelKind
from engine.runner.batch import build_batch, rows_and_drafts
from engine.runner.forward import STEP_TOKENS_MULTIPLE, Forward, ModelForward
from engine.runner.pending_step import PendingStep, ReadExplained
from engine.runner.sequence_rows import SequenceRows
from engine.sampling.logprobs import PendingLogprobs, prompt_logprobs
from engine.sampling.masks import LazyMasks, SequenceGrammars, TokenMasks
from engine.sampling.sampler import Draw, changes_logits, sample
from engine.scheduling.step import BlockCopy, EncoderInput, SampledToken, ScheduledSlice, Step

log = logging.getLogger(__name__)

Encode = Callable[[Sequence[EncoderInput], torch.device], torch.Tensor | None]
Logits = Callable[[torch.Tensor], torch.Tensor]
# Computes a step of decodes, and returns their tokens [R]; None if it computes none such.
DrawDecodes = Callable[[Step], torch.Tensor | None]
TextImages = Callable[[Sequence[Image], int], Generator[None, None, SeenTokens]]
KnownTokens = tuple[Sequence[PendingLogprobs], Sequence[ReadExplained]]  # wanted of prompts
Explain = Callable[
    [Sequence[ScheduledSlice], torch.Tensor, Logits, SequenceGrammars], Sequence[ReadExplained]
]


class Graphs(Protocol):
    """Captured steps: `engine/runner/step_graphs.py`."""

    def replay(self, step: Step, *, draws: bool) -> torch.Tensor | None:
        """Return logits [R, V] of the slices that sample, or None if the step is not captured.

        With `draws` their tokens are drawn too: the host does not change these logits.
        """

    def draw(self, count: int) -> torch.Tensor:
        """Return the tokens [count] of these logits, which are appended to their rows."""

    def capture_at_start(self) -> None: ...

    def capture_next(self) -> bool:
        """Capture one more step; returns False if all are captured."""


class Followers(Protocol):
    """The other ranks, which compute the same steps: `engine/parallel/followers.py`."""

    def compute(self, step: Step, *, has_masks: bool) -> None:
        """Let them compute a step. If it `has_masks`, they wait for `mask`."""

    def mask(self, masks: TokenMasks) -> None: ...

    def show(self, seen: SeenTokens) -> None:
        """Give them the embeddings of images that the next step reads."""

    def capture(self) -> None:
        """Let them capture one more step graph."""

    def read_adapter(self, adapter: int, path: str) -> None:
        """Let them begin to read an adapter."""

    def place_adapter(self, adapter: int, slot: int) -> None:
        """Let them place it as this rank does."""

    def wait(self) -> None:
        """Note that this rank waits for its device, which may wait for theirs."""

    def rest(self) -> None:
        """Note that this rank waits for none of them."""


class ModelRunner:
    """A loaded model over a KV cache and rows. With `graphs` steps are replayed where they fit."""

    def __init__(
        self,
        model: Model,
        kind: ModelKind,
        backend: AttentionBackend,
        kv: KVCache,
        rows: SequenceRows,
        matchers: SequenceGrammars,
        forward: ModelForward,
        draw: Draw,
        encode: Encode,
        explain: Explain,
        *,
        programs: Forward | None,
        decodes: DrawDecodes | None,
        graphs: Graphs | None,
        adapters: ModelAdapters | None,
        poll: Callable[[float], None],
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        """`programs` compute batches faster than `forward`, with the same bits, or call it.

        `decodes` compute steps whose rows need no more than a draw, from row ids to tokens.
        Without `adapters` the model takes none. `poll` gets the CLOCK_MONOTONIC seconds of each
        launch. `gauges` returns measurements of this process by the names that /metrics exports.
        """
        self.model, self.kind, self.backend = model, kind, backend
        self.kv, self.rows = kv, rows
        self.device = rows.device
        self.forward, self.draw = forward, draw
        self.programs = programs
        self.decodes = decodes
        self.graphs = graphs
        self.matchers = matchers
        self.adapters = adapters
        self.gauges = gauges
        self.followers: Followers | None = None  # None: this rank is alone, or follows another
        self._encode, self._explain, self._poll = encode, explain, poll
        self._can_capture = True
        # Each returns what computes the hidden states of a step in place of the model, or None.
        self.replacements: list[Callable[[Step], Forward | None]] = []
        # Returns the tokens of a step that show images.
        self.seen_tokens: Callable[[Step], SeenTokens | None] = lambda step: None
        # Yields between units of encoding, and returns what shows images in a text of this length.
        self.embeddings_of_text: TextImages | None = None
        # Each gets the hidden states of a step that no graph computed, once its tokens are drawn.
        self.observers: list[Callable[[Step, torch.Tensor], None]] = []

    def lead(self, followers: Followers) -> None:
        """Let other ranks compute the same steps from now on."""
        self.followers = followers

    # ---- one step ----------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Compute one step: write rows and blocks, run the model, sample, append the tokens."""
        launched_at = time.monotonic()
        self._poll(launched_at)
        sampling = [s for s in step.slices if s.samples]
        masks = self.matchers.start(sampling)
        seen = self.seen_tokens(step)
        if self.followers is not None:
            if seen is not None:
                self.followers.show(seen)
            self.followers.compute(step, has_masks=masks is not None)
        if step.copies:
            self._copy_blocks(step.copies)
        # Scrubbing takes two launches a layer, and large batches allocate in nearly every step.
        if step.scrub and self.backend.reads_masked_keys:
            self.kv.scrub(step.scrub)
        self.rows.apply(step)
        encoded = self._encode(step.encoder_inputs, self.device) if step.encoder_inputs else None
        tokens: torch.Tensor | None = None
        logprobs: PendingLogprobs | None = None
        known: KnownTokens = (), ()
        if step.slices:
            tokens, logprobs, known = self._tokens(step, sampling, masks, seen)
        cut = masks.result().broken if masks else frozenset[int]()
        pending = PendingStep(
            step, launched_at, self.device, tokens, logprobs, encoded, *known, cut=cut
        )
        self.matchers.launched(pending)
        return pending

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        groups = sorted({copy.group for copy in copies})
        read = chain.from_iterable(self._read_parts(copies, group) for group in groups)
        # A source of one group may be a target of another one.
        write_parts(read if len(groups) == 1 else list(read))

    def _read_parts(self, copies: Sequence[BlockCopy], group: int) -> Iterator[PartCopies]:
        own = [copy for copy in copies if copy.group == group]
        return self.kv.read_parts(
            group,
            [copy.source for copy in own],
            [copy.target for copy in own],
            [copy.tokens for copy in own],
            transposed_keys=self.backend.transposes_keys,
        )

    def _tokens(
        self,
        step: Step,
        sampling: Sequence[ScheduledSlice],
        masks: LazyMasks | None,
        seen: SeenTokens | None,
    ) -> tuple[torch.Tensor | None, PendingLogprobs | None, KnownTokens]:
        """Compute the slices of a step. Return the tokens [R] of those that sample, and more.

        The tokens are None if no slice samples.
        """
        special = self.rows.special_params(sampling)
        changed = self._replacement(step)
        is_plain = not (special or masks or changed or self.observers)
        if self.decodes is not None and is_plain and not self._shows_images(step, seen):
            drawn = self.decodes(step)
            if drawn is not None:
                return drawn, None, ((), ())
        draws = not changes_logits(special, masks)
        logits, hidden, known = self._compute(step, changed, seen, draws=draws)
        tokens: torch.Tensor | None = None
        logprobs: PendingLogprobs | None = None
        if sampling:
            is_captured = hidden is None
            tokens, logprobs = self._sample(
                logits, sampling, special, masks, is_captured=is_captured
            )
        if hidden is not None:
            for observe in self.observers:
                observe(step, hidden)
        return tokens, logprobs, known

    def _shows_images(self, step: Step, seen: SeenTokens | None) -> bool:
        """Whether tokens of a step are of images, or have positions that only their row knows."""
        return seen is not None or self.rows.has_own_positions(step.slices)

    def _replacement(self, step: Step) -> Forward | None:
        """Return what computes the hidden states of a step in place of the model, if anything."""
        found = (forward_of(step) for forward_of in self.replacements)
        return next((forward for forward in found if forward), None)

    def _compute(
        self, step: Step, changed: Forward | None, seen: SeenTokens | None, *, draws: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, KnownTokens]:
        """Return logits [R, V] of the slices that sample, the hidden states [T, hidden] of all
        tokens, which a graph does not leave, and what slices want of known tokens.

        `changed` computes the hidden states in place of the model. `draws` is for `Graphs.replay`.
        """
        is_plain = changed is None and not self._shows_images(step, seen)
        if self.graphs is not None and is_plain and not self._wants_known(step):
            logits = self.graphs.replay(step, draws=draws)
            if logits is not None:
                return logits, None, ((), ())
        batch = build_batch(step, self.rows, self.kv, self.backend, self.adapters, seen)
        hidden = (changed or self.programs or self.forward)(batch)
        explained: Sequence[ReadExplained] = ()
        if self.rows.explain and step.prefills:
            explained = self._explain(step.slices, hidden, self.logits, self.matchers)
        known = self._prompt_logprobs(step.slices, hidden), explained
        return self.logits(hidden.index_select(0, batch.logit_index)), hidden, known

    def _wants_known(self, step: Step) -> bool:
        """Whether slices want logits of known tokens, which no graph leaves."""
        if not step.prefills:
            return False
        explain = self.rows.explain
        return any(s.num_prompt_logprobs or s.row in explain for s in step.slices)

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
        special: Mapping[int, SamplingParams],
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
            return rows.draw_next(logits, row_ids, ahead, static=graphs is not None)

        if masks and self.followers is not None:
            self.followers.mask(masks.result())
        on_device = masks.result().on(self.device) if masks else None
        return sample(logits, special, history, draw_and_append, on_device)

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

    def results(self, pending: PendingStep) -> list[SampledToken]:
        """Wait for the tokens of a step, and let the grammars compute what may follow them."""
        if self.followers is not None:
            self.followers.wait()
        sampled = pending.wait()
        if self.followers is not None:
            self.followers.rest()
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
        if self.followers is not None:
            self.followers.rest()
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
