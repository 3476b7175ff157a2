"""PendingStep: a launched step whose results may not have arrived on the host yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np
import torch

from engine.device.transfer import HostCopy
from engine.protocol.embed import EmbedOutput
from engine.protocol.generate import Explained, FinishReason, TokenLogprobs
from engine.sampling.logprobs import PendingLogprobs
from engine.scheduling.step import SampledToken, Step

ReadExplained = Callable[[], Sequence[Explained]]  # waits for the device


class PendingStep:
    """The results of one launch, on their way to the host. `wait` returns the tokens."""

    def __init__(
        self,
        step: Step,
        launched_at: float,
        device: torch.device,
        tokens: torch.Tensor | None,
        logprobs: PendingLogprobs | None,
        vectors: torch.Tensor | None,
        prompt_logprobs: Sequence[PendingLogprobs] = (),
        explained: Sequence[ReadExplained] = (),
        cut: Set[int] = frozenset(),
    ) -> None:
        """Copy the results, because the next launch may overwrite them.

        A step without results waits for the device too: otherwise the host would queue one prompt
        chunk after the other, and neither a new request nor an abort could overtake them.
        `tokens` [slices that sample] int64; `vectors` [pooled texts, numbers] fp32; None if the
        step has none. `launched_at` is CLOCK_MONOTONIC. `cut` are the indices of the sampling
        slices whose grammar cannot go on.
        """
        self.step = step
        self.launched_at = launched_at
        self._tokens = HostCopy([] if tokens is None else [tokens], device)
        self._logprobs = logprobs
        self._cut = cut
        self._prompt_logprobs = prompt_logprobs
        self._explained = explained
        self._vectors = None if vectors is None else HostCopy([vectors], device)

    def wait(self) -> list[SampledToken]:
        """Wait for the device: the only synchronisation. One SampledToken per sampling slice."""
        tokens: list[int] = [token for copy in self._tokens.wait() for token in copy.tolist()]
        if self._logprobs is None and not self._cut:
            return [SampledToken(token) for token in tokens]
        found = self._logprobs.read() if self._logprobs else {}
        sampled = []
        for index, token in enumerate(tokens):
            logprobs = found.get(index) if token >= 0 else None
            sampled.append(SampledToken(token, logprobs, index in self._cut))
        return sampled

    def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        """Return the prompt logprobs of each slice that wants some. Waits like `wait`."""
        return [list(pending.read().values()) for pending in self._prompt_logprobs]

    def explained(self) -> list[Explained]:
        """Return how known tokens were drawn, of slices that want it. Waits like `wait`."""
        return [token for read in self._explained for token in read()]

    def embeddings(self) -> list[EmbedOutput]:
        """Return the vectors of the step's texts. Waits like `wait`."""
        ids = [text.id for text in self.step.encoder_inputs if text.is_pooled]
        if self._vectors is None:
            return []
        outputs = []
        vectors = self._vectors.wait()[0].numpy()
        for request_id, vector in zip(ids, vectors, strict=True):
            finish: FinishReason = "stop" if np.isfinite(vector).all() else "error"
            outputs.append(EmbedOutput(request_id, vector.tobytes(), finish))
        return outputs
