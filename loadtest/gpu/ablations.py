"""The value of each optimisation: the same decoding without it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from engine.kernels.triton.chips import PLAIN
from engine.layers.attention import Attention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.ops.kernels import Kernels, use_kernels
from engine.sampling.sampler import draw_next
from loadtest.gpu.bench import Bench, Row
from loadtest.gpu.variants import forced


@contextmanager
def layers_in_torch(*types: type[nn.Module]) -> Iterator[None]:
    """Let layers of these types compute with torch, in engines that are loaded in this context."""

    def use(module: nn.Module, kernels: Kernels) -> None:
        use_kernels(module, kernels)
        for layer in module.modules():
            if isinstance(layer, types):
                setattr(layer, "kernels", "torch")  # noqa: B010 - see use_kernels

    with mock.patch("engine.runner.fill_weights.use_kernels", use):
        yield


@contextmanager
def sampling_in_torch() -> Iterator[None]:
    """Let engines that are loaded and run in this context draw tokens with torch.

    Draws are always static, as in a captured step, so that the host reads nothing.
    """

    def draw_in_torch(*given: Any, static: bool, out: torch.Tensor | None) -> torch.Tensor:
        others: Any = given[:-1]  # the last one names the kernels
        return draw_next(*others, static=True, out=out)

    with mock.patch("engine.runner.sequence_rows.draw_next", draw_in_torch):
        yield


# The value of each optimisation: the same decoding without it.
ABLATIONS: dict[str, dict[str, Any]] = {
    "all on": {},
    "overlap off": {"depth": 0},
    "graphs off": {"enforce_eager": True},
    "attention in torch": {"attention_backend": "torch"},
}
FUSIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "norms in torch": partial(layers_in_torch, RMSNorm),
    "head norms and rotation in torch": partial(layers_in_torch, Attention),
    "gates in torch": partial(layers_in_torch, MLP),
    "embedding in torch": partial(layers_in_torch, TokenEmbedding),
    "few rows times weights in torch": partial(layers_in_torch, Linear, LMHead),
    "sampling in torch": sampling_in_torch,
    "launches not overlapped": partial(forced, PLAIN),
}


def ablations(bench: Bench) -> list[Row]:
    """Measure decoding without one optimisation at a time."""
    model, batches = "qwen3-0.6b", (2,) if bench.smoke else (1, 64)
    context, steps = (32, 4) if bench.smoke else (1024, 64)
    rows, best = [], dict.fromkeys(batches, 0.0)
    for name in [*ABLATIONS, *FUSIONS]:
        with FUSIONS.get(name, nullcontext)():
            engine = bench.engine(
                model,
                max_num_seqs=max(batches),
                max_model_len=2 * context,
                **ABLATIONS.get(name, {}),
            )
            for batch in batches:
                works = bench.works(model, batch, context - steps // 2, context)
                rate = batch / statistics.mean(engine.decode_seconds(works, steps))
                best[batch] = best[batch] or rate
                lost = f"{100 * (1 - rate / best[batch]):.0f} % lost"
                rows.append(Row(f"0.6B, batch {batch}, {name}", rate, "tok/s", note=lost))
            del engine
    return rows
