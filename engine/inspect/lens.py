"""Compute a lens: one text apart from all requests, whose inside is returned.

A lens runs the model's own code on the torch reference of every op, with an AttentionPlan that
holds its own keys. It neither reads nor writes the KV cache and the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache, LayerStates
from engine.attention.spec import AttentionSpec
from engine.attention.weights_size import kept_layers, longest_text
from engine.device.transfer import to_device
from engine.inspect.ablations import decoder_mixers
from engine.inspect.lens_plan import LensPlan, as_bytes
from engine.inspect.residual import ResidualTaps
from engine.inspect.state_traces import (
    RecurrentLayer,
    StateTraces,
    recurrent_layers,
    traced_layers,
)
from engine.layers.attention import Attention, kv_specs
from engine.layers.embedding import TokenEmbedding
from engine.models.base import Model, has_image_axes, image_encoder
from engine.ops.kernels import use_kernels
from engine.ops.seen_tokens import SeenTokens
from engine.ops.state_runs import StateRuns
from engine.protocol.lens import (
    LensRequest,
    LensResult,
    Prediction,
)
from engine.runner.forward import TEXT_TOKENS_MULTIPLE
from engine.runner.image_positions import image_positions
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import slice_of_text

ROWS = 64  # whose logits are computed at once


def look(runner: ModelRunner, request: LensRequest) -> Iterator[LensResult | None]:
    """Yield None between the pieces of a lens, and its result at the end.

    The first pieces encode images, and the next one is the pass through the model. Each further one
    reads predictions from the stream after one layer, or after the last layer for some positions.
    """
    pieces = _pieces(runner, request)
    while True:
        try:
            with torch.inference_mode():
                piece = next(pieces)
        except StopIteration:
            return
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        yield piece


def _pieces(runner: ModelRunner, request: LensRequest) -> Iterator[LensResult | None]:
    if request.embeddings:
        cosines = _cosines(runner.model, request.tokens, runner.device)
        yield LensResult(request.id, cosines=as_bytes(cosines))
        return
    kept: frozenset[int] | None = None
    if request.attention:
        longest = max(len(request.tokens), len(request.source))
        kept = kept_layers(stack_specs(runner.model), longest, request.layers)
        if kept is None:
            yield LensResult(request.id, error="large")
            return
    recurrent = recurrent_layers(cast(nn.Module, runner.model)) if request.states else []
    traced = traced_layers(recurrent, len(request.tokens), request.layers)
    if traced is None:
        yield LensResult(request.id, error="large")
        return
    seen = None
    if request.images:
        assert runner.embeddings_of_text is not None, "the server sends images to models that see"
        seen = yield from runner.embeddings_of_text(request.images, len(request.tokens))
        yield None
    passed = LensPass(runner, request, kept, traced, seen)
    with reference_ops(runner):
        hidden = passed.compute()
    predictions: list[Prediction] = []
    logit_lens: list[Prediction] = []
    if runner.kind != "encoder" and request.predictions:
        for first in range(0, len(request.tokens), ROWS):
            yield None
            positions = range(first, min(first + ROWS, len(request.tokens)))
            with reference_ops(runner):
                logits = runner.logits(hidden[positions.start : positions.stop])
            predictions += _predictions(request, passed.num_layers, positions, logits)
        for layer in range(passed.num_layers) if request.positions else ():
            yield None
            with reference_ops(runner):
                logits = passed.logits_after(layer)
            logit_lens += _predictions(request, layer, request.positions, logits)
        wanted = set(request.positions)
        logit_lens += [found for found in predictions if found.position in wanted]
    yield LensResult(
        request.id,
        attention=passed.plan.attention,
        updates=passed.taps.updates,
        norms=passed.taps.norms,
        states=passed.traces.of_text(recurrent, len(request.tokens)),
        predictions=predictions,
        logit_lens=logit_lens,
    )


@contextlib.contextmanager
def reference_ops(runner: ModelRunner) -> Iterator[None]:
    """Let the model compute with the torch reference of every op, and restore its kernels."""
    module = cast(nn.Module, runner.model)
    use_kernels(module, "torch")
    try:
        yield
    finally:
        use_kernels(module, runner.rows.kernels)


class LensPass:
    """One pass of a request through the model."""

    def __init__(
        self,
        runner: ModelRunner,
        request: LensRequest,
        kept: frozenset[int] | None = None,
        traced: Sequence[RecurrentLayer] = (),
        seen: SeenTokens | None = None,
    ) -> None:
        """`kept` are the layers whose attention weights are kept; None: no layer is looked at.

        `traced` are the layers whose states are traced. `seen` are the tokens that show images.
        """
        self._runner, self._request, self._seen = runner, request, seen
        self._model = runner.model
        ids = [list(request.positions), list(request.tokens)]
        positions, tokens = to_device(ids, runner.device)
        module, device = cast(nn.Module, runner.model), runner.device
        self.taps = ResidualTaps(module, positions)
        states: list[LayerStates] | None = None
        if runner.kv.states is not None:  # the text has only slot 0, the state before it
            states = [tuple(part[:1].clone() for part in layer) for layer in runner.kv.states]
        self._kv = KVCache(kv_specs(module), 0, 1, torch.float32, device, states)
        self.traces = StateTraces(traced, states or [])
        readers = [a for a in module.modules() if isinstance(a, Attention) and not a.has_kv]
        read_again = {id(self._kv.layers[a.index]) for a in readers if a.spec.kind == "causal"}
        last_keys = None if seen is None else seen.last_keys
        self.plan = LensPlan(self.taps, tokens, kept, read_again, last_keys)

    def compute(self) -> torch.Tensor:
        """Return the hidden states [T, hidden] after the last layer and the last norm."""
        model, request = self._model, self._request
        count = len(request.tokens)
        if self._runner.kind == "encoder" and hasattr(model, "encode"):  # no decoder's trunk
            with self.taps.of_stack("encoder", count):
                return model.encode(self._batch(request.tokens))[:count]
        if request.source:
            with self.taps.of_stack("encoder", len(request.source)):
                model.encode(self._batch(request.source))
        with self.taps.of_stack("decoder", count):
            return model.forward(self._with_images(self._batch(request.tokens)))[:count]

    def _with_images(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch of the decoder's tokens with what they show of images."""
        if self._seen is None:
            return batch
        positions = batch.positions
        if has_image_axes(self._model):
            count = len(self._request.tokens)
            found = image_positions([slice_of_text(count)], {0: self._request.images})
            (columns,) = to_device([found.ravel()], self._runner.device)
            positions = F.pad(columns.view(found.shape), (0, len(batch.input_ids) - count))
        return replace(batch, seen=self._seen, positions=positions)

    def _batch(self, tokens: Sequence[int]) -> ForwardBatch:
        count = len(tokens)
        columns = [list(tokens), list(range(count))]
        ids, positions = to_device(columns, self._runner.device)
        batch = ForwardBatch(ids, positions, positions, self._kv, self.plan, count)
        if self._kv.states is not None:
            batch = replace(batch, runs=StateRuns.of_text(count, ids.device, self.traces.observer))
        return batch.padded(self._runner.forward.round_up(count, TEXT_TOKENS_MULTIPLE))

    @property
    def num_layers(self) -> int:
        """The layers of the last stack."""
        return len(self.taps.streams) - 1

    def logits_after(self, layer: int) -> torch.Tensor:
        """Return logits [positions, V] read from the stream after `layer` layers.

        A model with norms before its sublayers reads it through its last norm.
        """
        stream = self.taps.streams[layer]
        if self.taps.is_post_norm:
            return self._runner.logits(stream.normed)
        assert self.taps.last_norm is not None
        return self._runner.logits(self.taps.last_norm(stream.total))


def _predictions(
    request: LensRequest, layer: int, positions: Sequence[int], logits: torch.Tensor
) -> list[Prediction]:
    """Return the predictions in logits [positions, V]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    probabilities = logprobs.exp()
    # A logit of minus infinity has probability 0, which adds nothing.
    terms = probabilities * logprobs.clamp(min=torch.finfo(torch.float32).min)
    entropies = (-terms.sum(-1) / torch.log(torch.tensor(2.0))).tolist()
    best = torch.topk(probabilities, min(request.top, probabilities.shape[-1]), dim=-1)
    found = []
    for row, position in enumerate(positions):
        actual = None
        if position + 1 < len(request.tokens):
            probability = probabilities[row, request.tokens[position + 1]]
            rank = 1 + int((probabilities[row] > probability).sum())
            actual = float(probability), rank
        pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        found.append(Prediction(layer, position, entropies[row], tuple(pairs), actual))
    return found


def _cosines(model: Model, tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the cosine similarities [tokens, tokens] of token embeddings.

    A model's first embedding is that of its tokens, for a translation of the source's.
    """
    modules = cast(nn.Module, model).modules()
    embedding = next(layer for layer in modules if isinstance(layer, TokenEmbedding))
    (ids,) = to_device([list(tokens)], device)
    table = embedding.tensors.lookup(ids, 1.0, embedding.kernels)
    rows = torch.nn.functional.normalize(table.float(), dim=-1)
    return rows @ rows.T


def stack_specs(model: Model) -> list[dict[int, AttentionSpec]]:
    """Return the specs by kind: self-attention of a decoder, cross, full.

    The keys are the numbers of the layers in their stack. A recurrent layer has a number, too.
    """
    layers = [layer for layer in cast(nn.Module, model).modules() if isinstance(layer, Attention)]
    stacks = [decoder_mixers(model)]
    for kind in ("cross", "full"):
        stacks.append([layer for layer in layers if layer.spec.kind == kind])
    return [
        {at: layer.spec for at, layer in enumerate(stack) if isinstance(layer, Attention)}
        for stack in stacks
    ]


def max_lens_tokens(model: Model) -> int:
    """Return the longest text whose attention weights a lens may hold, in tokens."""
    specs = [spec for stack in stack_specs(model) for spec in stack.values()]
    return longest_text(specs, sees=image_encoder(model) is not None)
