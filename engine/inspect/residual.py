"""ResidualTaps: what joins the residual stream of a model, read at its norms.

Every sublayer's output passes the `add` of a norm, or of a Join. During a lens these methods are
replaced on the instances. So a model without a lens has no branch and no hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import LayerStates
from engine.layers.state import LayerState
from engine.ops.state_runs import StateRuns
from engine.protocol.lens import NormSizes, Stack, SublayerKind, Update

Add = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class JoinedStream:
    """The stream after one layer, at the positions of the logit lens, [positions, hidden] each."""

    total: torch.Tensor
    normed: torch.Tensor


class ResidualTaps:
    """Collects updates, norms and streams in the order of the computation.

    `attended` says which kind of attention the next output comes from, or that it comes from a
    recurrent layer; an output without one before it comes from an MLP. A further output of a layer
    comes from its inputs (Gemma 4).
    """

    def __init__(self, model: nn.Module, positions: torch.Tensor) -> None:
        self.updates: list[Update] = []
        self.norms: list[NormSizes] = []
        # After each layer of the last stack; index 0 is the stream that enters the first layer.
        self.streams: list[JoinedStream] = []
        self.last_norm: nn.Module | None = None
        self.is_post_norm = False
        self._model = model
        self._positions = self._index = positions
        self._stack: Stack = "decoder"
        self._num_tokens = 0
        self._kind: SublayerKind | None = None
        self._layers = 0  # whose attention, or recurrence, has been computed
        self._last_normed: torch.Tensor | None = None

    @contextlib.contextmanager
    def of_stack(self, stack: Stack, num_tokens: int) -> Iterator[None]:
        """Replace `add` of all norms and joins, and restore it on exit.

        Rows from `num_tokens` on are padding.
        """
        self._stack, self._kind, self._layers = stack, None, 0
        self._num_tokens = num_tokens
        # The positions are those of the decoder; a source may be shorter.
        self._index = self._positions if stack == "decoder" else self._positions[:0]
        self.streams.clear()
        self._last_normed = None
        tapped = [(name, layer) for name, layer in self._model.named_modules() if joins(layer)]
        states = [layer for layer in self._model.modules() if mixes(layer)]
        with contextlib.ExitStack() as restored:
            for state in states:
                restored.enter_context(noting(state, partial(self.attended, "recurrent")))
            for name, layer in tapped:
                vars(layer)["add"] = self._tap(name, layer, getattr(layer, "add"))  # noqa: B009
                restored.callback(vars(layer).pop, "add", None)
            yield

    def attended(self, kind: SublayerKind) -> int:
        """Return the layer of what is computed. Self-attention or a recurrence begins a layer."""
        self._kind = kind
        if kind != "cross":
            self._layers += 1
        return self._layers - 1

    def _tap(self, name: str, layer: nn.Module, add: Add) -> Add:
        def tapped(
            x: torch.Tensor, delta: torch.Tensor | None, *post: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            total, normed = add(x, delta, *post)
            if not self.streams:
                self.streams.append(self._at_positions(x, x))
            if delta is not None:
                self._joined(x, total, normed, delta, *post)
            if normed is not total:  # a Join has no norm
                tokens = slice(self._num_tokens)
                sizes = _rms(total[tokens]), _rms(normed[tokens])
                self.norms.append(NormSizes(self._stack, name, *sizes))
                self.last_norm = layer
            return total, normed

        return tapped

    def _joined(
        self,
        x: torch.Tensor,
        total: torch.Tensor,
        normed: torch.Tensor,
        delta: torch.Tensor,
        post: nn.Module | None = None,
    ) -> None:
        """Note that `delta`, or its norm by `post`, was added to the stream `x`."""
        output = (delta if post is None else post(delta))[: self._num_tokens]
        self.is_post_norm = x is self._last_normed
        self._last_normed = None if normed is total else normed
        layer = self._layers - 1
        kind = self._kind or self._kind_without_attention(layer)
        self._kind = None
        before = x[: self._num_tokens]
        scale = _share(output, before)
        later = _share(output[1:], before[1:]) if len(before) > 1 else float("nan")
        scales = _shares(output, before)
        self.updates.append(Update(self._stack, layer, kind, scale, later, scales))
        stream = self._at_positions(total, normed)
        del self.streams[layer + 1 :]
        self.streams.append(stream)

    def _kind_without_attention(self, layer: int) -> SublayerKind:
        own = [one for one in self.updates if (one.stack, one.layer) == (self._stack, layer)]
        return "per-layer input" if any(one.kind == "mlp" for one in own) else "mlp"

    def _at_positions(self, total: torch.Tensor, normed: torch.Tensor) -> JoinedStream:
        index = self._index
        return JoinedStream(total.index_select(0, index), normed.index_select(0, index))


def joins(layer: nn.Module) -> bool:
    return callable(getattr(layer, "add", None))


def mixes(layer: nn.Module) -> TypeGuard[LayerState]:
    """Return whether the layer is a state in place of attention."""
    return isinstance(layer, LayerState) and layer.replaces_attention


@contextlib.contextmanager
def noting(state: LayerState, note: Callable[[], object]) -> Iterator[None]:
    """Call `note` whenever a recurrent layer reads its state."""
    forward = state.forward

    def noted(batch: ForwardBatch) -> tuple[LayerStates, StateRuns]:
        note()
        return forward(batch)

    vars(state)["forward"] = noted
    try:
        yield
    finally:
        del vars(state)["forward"]


def _share(output: torch.Tensor, stream: torch.Tensor) -> float:
    of_output = output.double().var(correction=0)
    of_stream = stream.double().var(correction=0)
    return float((of_output / (of_output + of_stream)).sqrt())


def _shares(output: torch.Tensor, stream: torch.Tensor) -> bytes:
    """Return the update scale of each token, [tokens]."""
    of_output = output.double().var(dim=-1, correction=0)
    of_stream = stream.double().var(dim=-1, correction=0)
    return _bytes((of_output / (of_output + of_stream)).sqrt())


def _rms(x: torch.Tensor) -> bytes:
    return _bytes(x.double().square().mean(-1).sqrt())


def _bytes(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
