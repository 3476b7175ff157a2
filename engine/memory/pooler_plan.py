"""Plan the pooler of an encoder: its modules, on the meta device, whose sizes must fit together."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.logit_score import LOGIT_SCORE
from engine.checkpoint.sentence import read_sentence
from engine.checkpoint.sentence_modules import DenseConfig, PoolerConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.pooler import Pooler
from engine.models.base import Classifier, Model
from engine.models.logit_score import LogitScore


def plan_pooler(
    model: Model, head: Classifier | None, folder: Path, config: EngineConfig
) -> Pooler:
    """Return the pooler of a model: that of its head, else that of the checkpoint's files.

    Raises ConfigError if a file asks for what is not supported, or if sizes do not fit.
    """
    if config.pooling == LOGIT_SCORE and not isinstance(head, LogitScore):
        raise ConfigError("--pooling logit_score needs a decoder with the head of a vocabulary.")
    if head is not None and config.pooling not in (None, LOGIT_SCORE):
        raise ConfigError("--pooling is not possible: this model's own head pools its texts.")
    pooler = read_sentence(folder, pooling=config.pooling).pooler
    if head is not None:
        pooler = PoolerConfig((head.head_pooling,))
    with torch.device("meta"):
        planned = Pooler(pooler, model.config.hidden)
    _check_sizes(planned)
    return planned


def _check_sizes(pooler: Pooler) -> None:
    """Raise ConfigError unless each Dense module takes the numbers that it gets."""
    size = pooler.size
    for module in pooler.config.modules:
        if not isinstance(module, DenseConfig):
            continue
        if module.in_features != size:
            raise ConfigError(
                f"{module.folder / 'config.json'} has in_features = {module.in_features}, but it "
                f"gets vectors of {size} numbers."
            )
        size = module.out_features


def pooler_numbers(pooler: Pooler | None) -> int:
    """Return how many weights a pooler has, packed or not."""
    if pooler is None:
        return 0
    shapes = [module.config for module in pooler.dense_modules]
    return sum((dense.in_features + dense.has_bias) * dense.out_features for dense in shapes)


def pooler_bytes(pooler: Pooler | None) -> int:
    """Return the bytes of a pooler's weights, which are fp32."""
    return 4 * pooler_numbers(pooler)
