"""The operations of recurrent layers on a CPU, next to the linear layers around them.

The sizes are those of Qwen3.5-0.8B and of a model as large as SmolLM2-135M. Numba's kernels compute
a chunk and a decode. The chunk is also computed by torch in the chunked form of the gated delta
rule (arXiv 2412.06464). Errors are against the rule in fp64, with weak decays and with decays to
exp(-100) at every second token.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from engine.device.facts import DTYPES, select_dtype
from engine.layers.linear import Linear
from engine.ops.causal_conv import causal_conv
from engine.ops.gated_delta import gated_delta
from engine.ops.norm import gated_rms_norm
from engine.ops.state_runs import StateRuns
from loadtest.micro.case import Case, Table, in_turn

CHUNK = 1050  # tokens
BLOCK = 64  # tokens that the chunked form computes together
WIDTH = 4  # inputs in a sum of the convolution
DECODES = 200  # in a sample


@dataclass(frozen=True)
class Sizes:
    """Sizes of a recurrent layer with as many key heads as value heads."""

    hidden: int
    heads: int
    dim: int


SIZES = {"Qwen3.5-0.8B": Sizes(1024, 16, 128), "as SmolLM2-135M": Sizes(576, 9, 64)}


class Layer:
    """The weights, the states and the inputs of a layer, for a step of one sequence."""

    def __init__(self, sizes: Sizes, tokens: int, dtype: torch.dtype) -> None:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
        inner = sizes.heads * sizes.dim
        self.heads, self.dim = sizes.heads, sizes.dim
        self.into = self._linear(draw(4 * inner + 2 * sizes.heads, sizes.hidden), dtype)
        self.out = self._linear(draw(sizes.hidden, inner), dtype)
        self.taps = draw(3 * inner, WIDTH).to(dtype)
        self.norm = torch.ones(sizes.dim, dtype=dtype)
        self.a_log, self.dt_bias = draw(2, sizes.heads) * 0.3
        self.tails = torch.zeros(2, 3 * inner, WIDTH - 1, dtype=dtype)
        self.states = torch.zeros(2, sizes.heads, sizes.dim, sizes.dim)
        self.x = draw(tokens, sizes.hidden).to(dtype)
        self.mixed = draw(tokens, 3 * inner).to(dtype)
        self.gates = draw(tokens, 2 * sizes.heads).to(dtype)
        self.values = draw(tokens, sizes.heads, sizes.dim).to(dtype)
        writes = torch.zeros(tokens, dtype=torch.int64)
        writes[-1] = 1
        self.runs = StateRuns(torch.tensor([0, tokens]), torch.tensor([int(tokens == 1)]), writes)

    @staticmethod
    def _linear(weight: torch.Tensor, dtype: torch.dtype) -> Linear:
        layer = Linear(weight.shape[1], weight.shape[0])
        layer.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        layer.prepack()
        layer.kernels = "numba"
        return layer

    def heads_of_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.mixed.view(-1, 3, self.heads, self.dim).unbind(1)
        return q, k, v

    def delta(self) -> torch.Tensor:
        a, b = self.gates.chunk(2, dim=1)
        return gated_delta(
            *self.heads_of_inputs(),
            a,
            b,
            self.a_log,
            self.dt_bias,
            self.states,
            self.runs,
            kernels="numba",
        )

    def chunked(self) -> torch.Tensor:
        a, b = self.gates.chunk(2, dim=1)
        log_decay = -self.a_log.exp() * F.softplus(a.float() + self.dt_bias)
        return chunked_delta(*self.heads_of_inputs(), log_decay, b.float().sigmoid())

    def conv(self) -> torch.Tensor:
        return causal_conv(
            self.mixed, self.taps, None, self.tails, self.runs, silu=True, kernels="numba"
        )

    def gated_norm(self) -> torch.Tensor:
        gate = self.values
        return gated_rms_norm(self.values, gate, self.norm, 1e-6, gate_first=False, kernels="numba")

    def linear(self) -> None:
        self.into(self.x)
        self.out(self.values.flatten(1))


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def chunked_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Return the delta rule's results in fp32, block by block; arguments are [T, H, ...]."""
    tokens, scale = len(q), q.shape[-1] ** -0.5
    blocks = -(-tokens // BLOCK)
    rest = blocks * BLOCK - tokens
    padded = [F.pad(x.float().movedim(0, -1), (0, rest)) for x in (q, k, v)]
    q, k, v = (x.reshape(*x.shape[:2], blocks, BLOCK).movedim(1, -1) for x in padded)
    q, k = unit(q) * scale, unit(k)
    sums, rates = (
        F.pad(x.float().t(), (0, rest)).reshape(-1, blocks, BLOCK) for x in (log_decay, beta)
    )
    sums = sums.cumsum(-1)
    decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
    rates = rates[..., None]
    system = (rates * k @ k.mT * decay).tril(-1) + torch.eye(BLOCK)
    inputs = torch.cat([rates * v, rates * k * sums.exp()[..., None]], -1)
    new, held = torch.linalg.solve_triangular(system, inputs, upper=False).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    state, found = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), []
    for n in range(q.shape[1]):
        change = new[:, n] - held[:, n] @ state
        ends, total = sums[:, n], sums[:, n, -1:]
        inside = (q[:, n] @ k[:, n].mT * decay[:, n]) @ change
        found.append((q[:, n] * ends.exp()[..., None]) @ state + inside)
        behind = (k[:, n] * (total - ends).exp()[..., None]).mT @ change
        state = state * total.exp()[..., None] + behind
    return torch.cat(found, 1)[:, :tokens].movedim(0, 1)


def exact_delta(layer: Layer) -> torch.Tensor:
    """Return the rule in fp64, token by token."""
    q, k, v = (x.double() for x in layer.heads_of_inputs())
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    a, b = layer.gates.double().chunk(2, dim=1)
    rate = -layer.a_log.double().exp()
    decay = (rate * F.softplus(a + layer.dt_bias.double(), threshold=50)).exp()[..., None, None]
    state, found = torch.zeros(layer.states.shape[1:], dtype=torch.float64), []
    for token in range(len(q)):
        state = state * decay[token]
        held = (state * k[token, :, :, None]).sum(1)
        change = b[token].sigmoid()[:, None] * (v[token] - held)
        state = state + k[token, :, :, None] * change[:, None]
        found.append((state * q[token, :, :, None]).sum(1))
    return torch.stack(found)


def errors(sizes: Sizes) -> dict[str, str]:
    """Return the largest error of both forms in fp32, of the largest result."""
    layer = Layer(sizes, CHUNK, torch.float32)
    found: dict[str, list[str]] = {"delta rule": [], "chunked in torch": []}
    for strong in (False, True):
        if strong:
            layer.gates[1::2, : sizes.heads] += 100 / layer.a_log.exp()
        due = exact_delta(layer)
        for name, way in (("delta rule", layer.delta), ("chunked in torch", layer.chunked)):
            error = (way().double() - due).abs().max() / due.abs().max()
            found[name].append(f"{error:.1e}")
    return {name: f"error {weak}, strong decays {strong}" for name, (weak, strong) in found.items()}


def milliseconds(way: Callable[[], object], count: int, number: int) -> float:
    """Return the time of one of `count` calls, in round `number`."""
    way()
    began = time.perf_counter()
    for _ in range(count):
        way()
    return (time.perf_counter() - began) * 1e3 / count


@torch.inference_mode()
def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    torch.set_num_threads(options.threads)
    dtype = select_dtype(options.dtype, torch.device("cpu"))
    for name, sizes in SIZES.items():
        for tokens, count in ((CHUNK, 1), (1, DECODES)):
            layer = Layer(sizes, tokens, dtype)
            ways: dict[str, Callable[[], object]] = {
                "delta rule": layer.delta,
                "convolution": layer.conv,
                "gated norm": layer.gated_norm,
                "linear layers": layer.linear,
            }
            if tokens > 1:
                ways["chunked in torch"] = layer.chunked
            timed = {way: partial(milliseconds, call, count) for way, call in ways.items()}
            samples = in_turn(timed, options.rounds)
            notes = errors(sizes) if tokens > 1 else {}
            yield Table(samples, f"ms for {tokens} tokens, {name}", ("linear layers",), notes=notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


CASE = Case(__doc__, add_options, measure)
