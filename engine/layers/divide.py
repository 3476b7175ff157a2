"""Divide a model among ranks: each layer keeps the share that it declares."""

from __future__ import annotations

from torch import nn

from engine.device.ranks import FLAG, Ranks
from engine.errors import ConfigError
from engine.layers.attention import Attention, RotaryAttention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.norm import GroupedRMSNorm, SharedRMSNorm
from engine.layers.recurrent import CausalConv
from engine.layers.state import LayerState

DIVISIBLE = (
    Attention
    | CausalConv
    | GroupedRMSNorm
    | LayerState
    | Mamba2
    | RotaryAttention
    | Linear
    | TokenEmbedding
    | LMHead
    | SharedRMSNorm
)


def divide(module: nn.Module, ranks: Ranks) -> None:
    """Let every layer of a model on the meta device keep the share of this rank.

    Raises ConfigError, naming the layer, if one cannot be divided.
    """
    if ranks.count == 1:
        return
    for name, layer in module.named_modules():
        if not isinstance(layer, DIVISIBLE):
            continue
        try:
            layer.divide(ranks)
        except ConfigError as error:
            raise ConfigError(f"{FLAG} {ranks.count} is not possible: {name} {error}.") from None
