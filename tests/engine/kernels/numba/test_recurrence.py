"""Numba's kernels of recurrent layers: threads, recorded steps, and the dtypes of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.device.openmp import parallel
from engine.kernels.numba import causal_conv as conv_kernels
from engine.kernels.numba import gated as gated_kernels
from engine.kernels.numba import recurrence as recurrence_kernels
from engine.ops.arena import Arena
from engine.ops.causal_conv import causal_conv
from engine.ops.gated import sigmoid_mul
from engine.ops.gated_delta import gated_delta
from engine.ops.kernels import Kernels
from engine.ops.norm import gated_rms_norm
from engine.ops.program import record
from engine.ops.selective_scan import selective_scan
from engine.ops.state_runs import StateRuns
from tests.support.recurrent_ops import OPERATIONS, Operation, Piece, delta, draw, runs_of, scan

pytestmark = pytest.mark.skipif(parallel() is None, reason="this torch has no OpenMP threads")
HEADS, SIZE = 4, 32
WIDTH = HEADS * SIZE


class Layer:
    """The operations between the linear layers of recurrent layers, with states in three slots."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight = draw(3 * WIDTH, 4, seed=1).to(dtype)
        self.vectors = draw(3, HEADS, seed=2)
        self.norm = draw(SIZE, seed=3).to(dtype)
        self.tails = draw(4, 3, 3 * WIDTH, seed=4).to(dtype)
        self.states = draw(2, 4, HEADS, SIZE, SIZE, seed=5)
        self.tails[0] = 0
        self.states[:, 0] = 0

    def __call__(self, x: torch.Tensor, runs: StateRuns, kernels: Kernels) -> torch.Tensor:
        """Return [T, HEADS * SIZE] for a projection [T, 4 * HEADS * SIZE + 2 * HEADS]."""
        mixed, gate, a, b = x.split([3 * WIDTH, WIDTH, HEADS, HEADS], dim=1)
        z = gate.unflatten(1, (HEADS, SIZE))
        mixed = causal_conv(mixed, self.weight, None, self.tails, runs, silu=True, kernels=kernels)
        q, k, v = mixed.unflatten(1, (3, HEADS, SIZE)).unbind(1)
        a_log, dt_bias, d = self.vectors
        first, second = self.states
        y = gated_delta(q, k, v, a, b, a_log, dt_bias, first, runs, kernels=kernels)
        y = gated_rms_norm(y, z, self.norm, 1e-6, gate_first=False, kernels=kernels)
        y = selective_scan(y, q, k, b, a_log, d, dt_bias, second, runs, kernels=kernels)
        y = gated_rms_norm(y, z, self.norm, 1e-6, gate_first=True, kernels=kernels)
        return sigmoid_mul(y, z, kernels).flatten(1)


def projection(tokens: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return draw(tokens, 4 * WIDTH + 2 * HEADS, seed=seed).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recorded_decodes_replay_without_an_operation_of_torch(dtype: torch.dtype) -> None:
    """Later steps write other slots and inputs into the recorded memory."""
    recorded, due = Layer(dtype), Layer(dtype)
    x = projection(3, dtype, seed=6)
    reads, writes = torch.tensor([1, 0, 3]), torch.tensor([1, 2, 3])
    runs = StateRuns(torch.arange(4), reads, writes)
    result, replay = record(lambda: recorded(x, runs, "numba"), Arena())
    assert replay is not None
    assert replay._calls == []
    assert torch.equal(result, due(x, runs, "numba"))
    for step in range(4):
        x.copy_(projection(3, dtype, seed=10 + step))
        reads.copy_(torch.tensor([[1, 2, 3], [3, 0, 1]][step % 2]))
        writes.copy_(torch.tensor([[1, 2, 3], [3, 0, 1]][step % 2]))
        assert torch.equal(replay(), due(x, runs, "numba")), step
        assert torch.equal(recorded.states, due.states)
        assert torch.equal(recorded.tails, due.tails)


def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence_kernels, "ALONE", 0)
    monkeypatch.setattr(conv_kernels, "ALONE", 0)
    monkeypatch.setattr(gated_kernels, "PART", 1)
    before, x = torch.get_num_threads(), projection(40, torch.bfloat16, seed=6)
    pieces = [Piece(0, 17, read=1, write=1), Piece(17, 18, read=2, write=2), Piece(18, 39, write=3)]
    runs = runs_of(pieces, padding=1)
    try:
        torch.set_num_threads(1)
        layer = Layer(torch.bfloat16)
        due = layer(x, runs, "numba")
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            other = Layer(torch.bfloat16)
            assert torch.equal(other(x, runs, "numba"), due)
            assert torch.equal(other.states, layer.states)
            assert torch.equal(other.tails, layer.tails)
    finally:
        torch.set_num_threads(before)


def test_layer_matches_the_reference() -> None:
    x = projection(9, torch.float32, seed=6)
    runs = runs_of([Piece(0, 5, read=1, write=1), Piece(5, 9, read=2, write=3)], padding=0)
    layers = {kernels: Layer(torch.float32) for kernels in ("torch", "numba")}
    due = layers["torch"](x, runs, "torch")
    found = layers["numba"](x, runs, "numba")
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layers["numba"].states, layers["torch"].states)
    assert torch.equal(layers["numba"].tails, layers["torch"].tails)


@pytest.mark.parametrize("name", ["delta", "scan"])
@pytest.mark.parametrize(
    "convert",
    [
        lambda ragged, vectors: (ragged, [vectors[0].bfloat16(), *vectors[1:]]),
        lambda ragged, vectors: (ragged, [vector.bfloat16() for vector in vectors]),
        lambda ragged, vectors: ([*ragged[:3], *(x.float() for x in ragged[3:])], vectors),
        lambda ragged, vectors: ([*ragged[:4], *(x.float() for x in ragged[4:])], vectors),
    ],
    ids=["a_log", "vectors", "gates", "beta"],
)
def test_gates_and_vectors_of_other_dtypes_match_the_reference(
    name: str, convert: Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]
) -> None:
    """Checkpoints keep some of them in fp32."""
    operation = OPERATIONS[name]
    inputs = operation.inputs(6, torch.bfloat16)
    ragged, vectors = convert(list(inputs[: operation.ragged]), list(inputs[operation.ragged :]))
    given = (*ragged, *vectors)
    found, due = (
        operation.run(given, [Piece(0, 6)], operation.states(0, torch.bfloat16), kernels)[0]
        for kernels in ("numba", "torch")
    )
    torch.testing.assert_close(found, due, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(
    "operation", [delta(1, 2, 128, 128), scan(2, 1, 64, 128)], ids=["delta", "scan"]
)
def test_published_sizes_match_fp64(operation: Operation) -> None:
    inputs = operation.inputs(60, torch.float32)
    [found, _] = operation.run(inputs, [Piece(0, 60)], operation.states(0, torch.float32), "numba")
    exact = operation.exact(inputs)
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error < 4e-7
