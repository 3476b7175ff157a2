"""Divide a model among ranks: each layer keeps the share that it declares."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from engine.device.ranks import FLAG, Ranks
from engine.errors import ConfigError


@runtime_checkable
class Divisible(Protocol):
    """A layer that ranks share. Every rank has the others whole."""

    def divide(self, ranks: Ranks) -> None:
        """Keep the share of this rank. Raises ConfigError if that is not possible."""


def divide(module: nn.Module, ranks: Ranks) -> None:
    """Let every layer of a model on the meta device keep the share of this rank.

    Raises ConfigError, naming the layer, if one cannot be divided.
    """
    if ranks.count == 1:
        return
    for name, layer in module.named_modules():
        if not isinstance(layer, Divisible):
            continue
        try:
            layer.divide(ranks)
        except ConfigError as error:
            raise ConfigError(f"{FLAG} {ranks.count} is not possible: {name} {error}.") from None
