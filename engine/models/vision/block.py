"""The parts that all towers share: the pre-norm block, its linear layers, and names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.checkpoint.weight_map import Names
from engine.device.ranks import Ranks
from engine.layers.linear import Linear
from engine.layers.mlp import MLP, Activation
from engine.layers.norm import LayerNorm, RMSNorm
from engine.layers.span_attention import Attended, SpanAttention, Spans
from engine.ops.kernels import Kernels
from engine.ops.norm import Tensors
from engine.ops.rotary import Angles, apply_rotary

QKV = ("q", "k", "v")
# The work on an image, which pauses before each unit and ends with a result. The answers to other
# requests go on in the pauses. A pause may be sent the most patches of the next unit.
Units = Generator[None, int | None, torch.Tensor]
AT_ONCE_CPU, AT_ONCE_GPU = 1024, 2**14  # patches that go through a layer together


class TowerLinear(Linear):
    """A linear layer of a tower or a connector: it is never quantised, and takes no adapters.

    Each rank has it whole. Rank 0 encodes images alone and sends the others the embeddings, because
    a unit that fails for lack of memory would leave ranks that add their shares waiting.
    """

    takes_adapters = False

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        *,
        bias: bool = False,
        output_units: Mapping[str, int] | None = None,
        input_units: int | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            is_rounded=False,
            output_units=output_units,
            input_units=input_units,
        )

    def divide(self, ranks: Ranks) -> None:
        """Keep all of it."""


class PatchEmbedding(TowerLinear):
    """A convolution over squares that do not overlap, as a product with their pixels."""

    def __init__(self, in_features: int, hidden: int, *, bias: bool) -> None:
        super().__init__(in_features, hidden, bias=bias)
        self.tensors.flattens = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The sizes of a tower's blocks."""

    hidden: int
    intermediate: int
    heads: int
    activation: Activation
    norm: Callable[[], LayerNorm | RMSNorm]
    gate: Sequence[str] = ("",)  # the parts of the MLP's first layer


class VisionBlock(nn.Module):
    """Attention and MLP behind a norm each (arXiv 2010.11929), all with biases."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        s = shape
        self.attention_norm = s.norm()
        sizes, units = dict.fromkeys(QKV, s.hidden), dict.fromkeys(QKV, s.heads)
        self.qkv = TowerLinear(s.hidden, sizes, bias=True, output_units=units)
        self.attend = SpanAttention(s.heads, s.hidden // s.heads)
        self.out = TowerLinear(s.hidden, s.hidden, bias=True, input_units=s.heads)
        self.mlp_norm = s.norm()
        self.mlp = MLP(
            s.hidden, s.intermediate, s.activation, parts=s.gate, bias=True, linear=TowerLinear
        )
        self.kernels: Kernels = "torch"

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, spans: Spans, angles: Angles | None
    ) -> Generator[None, int | None, Tensors]:
        """Return the residual stream [T, hidden] and the MLP's output, not yet added to it.

        `x` and `delta` are these two values of the previous block. `angles` are cosines and signed
        sines [T, 1, D] that queries and keys are rotated by. Units are rows, first up to their
        queries, keys and values, then from their attention on. No bit depends on their size.
        """
        streams, inputs = [], []
        first = 0
        while first < len(x):
            rows = _rows(first, (yield), len(x))
            stream, normed = self.attention_norm.add(
                x[rows], None if delta is None else delta[rows]
            )
            streams.append(stream)
            inputs.append(self.qkv(normed))
            first = rows.stop
        x = _joined(streams)
        attended = self._attend(_joined(inputs), spans, angles)
        streams, deltas = [], []
        first = 0
        while first < len(x):
            rows = _rows(first, (yield), len(x))
            stream, normed = self.mlp_norm.add(x[rows], self.out(attended(rows)))
            streams.append(stream)
            deltas.append(self.mlp(normed))
            first = rows.stop
        return _joined(streams), _joined(deltas)

    def _attend(self, qkv: torch.Tensor, spans: Spans, angles: Angles | None) -> Attended:
        heads = self.attend.spec.num_heads
        qkv = qkv.view(len(qkv), 3 * heads, -1)
        qk, v = qkv[:, : 2 * heads], qkv[:, 2 * heads :]
        if angles is not None:
            qk = apply_rotary(qk, *angles, kernels=self.kernels)
        return self.attend.begin(qk[:, :heads], qk[:, heads:], v, spans)


def _rows(first: int, most: int | None, count: int) -> slice:
    """Return the next `most` of `count` rows, or all that are left."""
    return slice(first, count if most is None else min(first + most, count))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def under(names: Names, module: str, tensor: str) -> dict[str, str | Mapping[str, str]]:
    """Return `names` with a beginning of our modules' names, and one of a checkpoint's."""
    return {(module + ours).rstrip("."): _under(theirs, tensor) for ours, theirs in names.items()}


def _under(name: str | Mapping[str, str], prefix: str) -> str | dict[str, str]:
    if isinstance(name, str):
        return (prefix + name).rstrip(".")
    return {part: prefix + each for part, each in name.items()}


def in_parts(pixels: torch.Tensor, patches: int, encode: Callable[[torch.Tensor], Units]) -> Units:
    """Encode tiles [tiles, ...] of `patches` each, few at a time on a CPU; join the results.

    There, hidden states of more tokens leave the cache: 5 tiles of SmolVLM together took 5 % more
    time than one after the other.
    """
    rows = AT_ONCE_CPU if pixels.device.type == "cpu" else AT_ONCE_GPU
    done: list[torch.Tensor] = []
    for part in pixels.split(max(1, rows // patches)):
        encoded = yield from encode(part)
        done.append(encoded)
    return done[0] if len(done) == 1 else torch.cat(done)
