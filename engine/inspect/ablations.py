"""Ablations: compute steps in which some requests have heads or layers of the decoder switched off.

The step is computed by the model's own code and kernels, without graphs and programs. Masks change
only the tokens of these requests, so the others keep every bit:

- a head's output is zero behind attention, before the output projection;
- a sublayer's output is zero where it joins the residual stream, at the `add` of a norm or Join.

Michel, Levy, Neubig: Are Sixteen Heads Really Better than One? (arXiv 1905.10650).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from engine.attention.backend import AttentionPlan
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.inspect.residual import joins, mixes, noting
from engine.layers.attention import Attention
from engine.layers.state import LayerState
from engine.models.base import Model
from engine.protocol.generate import Ablation
from engine.runner.forward import Forward
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import Step


class AblatedTokens(NamedTuple):
    """Tokens [first, end) of a step that belong to a request with an ablation."""

    first: int
    end: int
    ablation: Ablation


class Ablations:
    """The requests of the engine that have an ablation, by id.

    While there are some, the runner asks `forward_of` about each step.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._of: dict[int, Ablation] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, request_id: int, ablation: Ablation) -> None:
        self._of[request_id] = ablation
        if self.forward_of not in self._runner.replacements:
            self._runner.replacements.append(self.forward_of)

    def keep(self, ids: Collection[int]) -> None:
        """Forget all requests but those with these ids."""
        self._of = {key: ablation for key, ablation in self._of.items() if key in ids}
        if not self._of:
            self._runner.replacements.remove(self.forward_of)

    def forward_of(self, step: Step) -> Forward | None:
        """Return what computes the hidden states of a step; None if the model does it alone."""
        found = []
        end = 0
        for s in step.slices:
            end += s.count
            if s.id in self._of:
                found.append(AblatedTokens(end - s.count, end, self._of[s.id]))
        return partial(self._forward, found) if found else None

    def _forward(self, tokens: Sequence[AblatedTokens], batch: ForwardBatch) -> torch.Tensor:
        masks = StepMasks(self._runner, tokens, batch.num_tokens)
        ablated = replace(batch, plan=AblatedPlan(batch.plan, masks), adds_apart=True)
        with masks.applied():
            return self._runner.forward(ablated)


class StepMasks:
    """Masks of a step of T tokens, by layer, and the layer that is being computed."""

    def __init__(self, runner: ModelRunner, tokens: Sequence[AblatedTokens], count: int) -> None:
        self._module = cast(nn.Module, runner.model)
        mixers = decoder_mixers(runner.model)
        attentions = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        self._kv = {id(runner.kv.layers[attention.index]) for attention in attentions}
        self._recurrent = [mixer for mixer in mixers if mixes(mixer)]
        self.layer = -1  # -1: none yet
        self.heads: dict[int, torch.Tensor] = {}  # by layer: [T, H, 1], True for those that are off
        self._off: dict[int, torch.Tensor] = {}  # by layer: [T, 1], True for tokens without it
        sizes = ablatable_heads(runner.model)
        for first, end, ablation in tokens:
            for layer, head in ablation.heads:
                if layer not in self.heads:
                    shape = (count, sizes[layer], 1)
                    self.heads[layer] = torch.zeros(shape, dtype=torch.bool, device=runner.device)
                self.heads[layer][first:end, head] = True
            for layer in ablation.layers:
                if layer not in self._off:
                    off = torch.zeros((count, 1), dtype=torch.bool, device=runner.device)
                    self._off[layer] = off
                self._off[layer][first:end] = True

    def enter(self, kv: LayerKV | None) -> None:
        """Note that attention over `kv` is computed. Self-attention begins a layer."""
        self.layer += id(kv) in self._kv

    def _enter_recurrent(self) -> None:
        self.layer += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace `add` of all norms and joins, and restore it on exit."""
        tapped = [layer for layer in self._module.modules() if joins(layer)] if self._off else []
        with contextlib.ExitStack() as stack:
            for state in self._recurrent:
                stack.enter_context(noting(state, self._enter_recurrent))
            for layer in tapped:
                vars(layer)["add"] = self._masked(getattr(layer, "add"))  # noqa: B009
                stack.callback(vars(layer).pop, "add", None)
            yield

    def _masked(self, add: Any) -> Any:
        def masked(x: torch.Tensor, delta: torch.Tensor | None, *post: Any) -> Any:
            off = self._off.get(self.layer)
            if delta is not None and off is not None:
                delta = delta.clone()
                delta[: len(off)].masked_fill_(off, 0)  # padding follows the tokens
            return add(x, delta, *post)

        return masked


class AblatedPlan:
    """An AttentionPlan whose result is zero for the heads that are switched off."""

    def __init__(self, plan: AttentionPlan, masks: StepMasks) -> None:
        self._plan, self._masks = plan, masks
        self.layout = plan.layout

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
        self._plan.store(kv, key, value)

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._masks.enter(kv)
        result = self._plan.attend(spec, kv, query, key, value, bias, sinks)
        off = self._masks.heads.get(self._masks.layer)
        if off is None or spec.kind != "causal":
            return result
        return result.masked_fill(off, 0)


def decoder_mixers(model: Model) -> list[Attention | LayerState]:
    """Return the self-attention, or the state, of each layer of the decoder, in their order."""
    return [
        layer
        for layer in cast(nn.Module, model).modules()
        if mixes(layer) or (isinstance(layer, Attention) and layer.spec.kind == "causal")
    ]


def ablatable_heads(model: Model) -> tuple[int, ...]:
    """Return the number of heads in each layer of the decoder; a recurrent layer has none."""
    return tuple(
        mixer.spec.num_heads if isinstance(mixer, Attention) else 0
        for mixer in decoder_mixers(model)
    )
