"""LogitScore: a decoder's head of the vocabulary as a head of one label."""

from __future__ import annotations

import torch

from engine.checkpoint.logit_score import LogitScoreConfig
from engine.checkpoint.sentence_modules import PoolingMode
from engine.errors import ConfigError
from engine.models.base import Model


class LogitScore:
    """A Classifier whose logit is that of one token behind the text, minus another one's."""

    head_pooling: PoolingMode = "lasttoken"

    def __init__(self, model: Model, config: LogitScoreConfig) -> None:
        """Raises ConfigError for tokens outside of the vocabulary."""
        self._model, self._config = model, config
        self.num_labels = 1
        self.passed_over: int | None = None
        size = model.config.vocab_size
        for token in (config.true_token, config.false_token or 0):
            if not 0 <= token < size:
                raise ConfigError(f"LogitScore has token {token}; the vocabulary has {size}.")

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(pooled)
        score = logits[:, self._config.true_token]
        if self._config.false_token is not None:
            score = score - logits[:, self._config.false_token]
        return score[:, None]
