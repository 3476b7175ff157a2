"""PendingStep: a launched step whose results may not be on the host yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.device.transfer import HostCopy
from engine.protocol import EmbedOutput, TokenLogprobs
from engine.sampling.logprobs import PendingLogprobs
from engine.scheduling.step import SampledToken, Step


class PendingStep:
    """What `launch` returns at once; `wait` gives the tokens."""

    def __init__(
        self,
        step: Step,
        launched_at: float,
        tokens: torch.Tensor | None,
        logprobs: PendingLogprobs | None,
        vectors: torch.Tensor | None,
        scores: Sequence[PendingLogprobs] = (),
    ) -> None:
        """tokens [samples] int64, vectors [texts to embed, hidden] fp32; None where there are
        none. They may be overwritten by the next launch: they are copied here."""
        self.step = step
        self.launched_at = launched_at  # CLOCK_MONOTONIC
        self._tokens = HostCopy([] if tokens is None else [tokens])
        self._logprobs = logprobs
        self._scores = scores
        self._vectors = HostCopy([] if vectors is None else [vectors])

    def wait(self) -> list[SampledToken]:
        """The single point of synchronisation: one SampledToken per sampling slice."""
        tokens: list[int] = [token for copy in self._tokens.wait() for token in copy.tolist()]
        if self._logprobs is None:
            return [SampledToken(token) for token in tokens]
        found = self._logprobs.read()
        return [SampledToken(t, found.get(n) if t >= 0 else None) for n, t in enumerate(tokens)]

    def scores(self) -> list[list[TokenLogprobs]]:
        """Of each slice that scores; waits like `wait`."""
        return [list(scores.read().values()) for scores in self._scores]

    def embeddings(self) -> list[EmbedOutput]:
        """The vectors of the step's texts; waits like `wait`."""
        ids = [encode.id for encode in self.step.encoder_inputs if encode.pooling]
        vectors = [vector for copy in self._vectors.wait() for vector in copy.numpy()]
        return [
            EmbedOutput(i, v.tobytes(), "stop" if np.isfinite(v).all() else "error")
            for i, v in zip(ids, vectors, strict=True)
        ]
