"""Attention whose values are the first numbers of keys, in Numba's kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numba import njit

from engine.attention import numba as numba_backend
from engine.attention.numba import NumbaBackend
from engine.attention.select import select_backend
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import SPLIT
from engine.errors import ConfigError
from engine.kernels.numba.call import AS_BF16, AS_FP32, AS_INT8, TILE
from engine.kernels.numba.source.transpose import transpose
from tests.engine.attention.test_torch import LATENT, check
from tests.support.kv_codes import as_stored, check_close
from tests.support.paged import PagedRun, Sequences, dense, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SPECS = {
    "few-heads": LATENT,
    "parts": AttentionSpec(24, 1, 40, scale=0.15, value_dim=16),
    "prime": AttentionSpec(17, 1, 24, scale=0.2, value_dim=16),
    "window": replace(LATENT, window=20, softcap=3.0),
    "whole-key": AttentionSpec(8, 2, 32, scale=0.2, value_dim=32, has_sinks=True),
}


def paged(
    sequences: Sequences, block_size: int = 16, kv_dtype: torch.dtype | None = None
) -> PagedRun:
    return PagedRun(sequences, block_size, backend=NumbaBackend(CPU), kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [
        (64, torch.bfloat16),
        pytest.param(16, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(16, torch.float32, marks=pytest.mark.slow),
        pytest.param(128, torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_numba_values_in_keys_match_dense_and_keep_their_bits(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype
) -> None:
    """Alone, in a batch, in chunks of several sizes, as decodes, and with heads in other parts."""
    lengths = [1, TILE + 1, block_size, SPLIT + 9]
    sequences = random_sequences(spec, lengths, dtype)
    found = paged(sequences, block_size).whole()
    check(sequences, found)
    for index, due in enumerate(found):
        parts = (sequences.queries, sequences.keys, sequences.values)
        alone = Sequences(spec, *([part[index]] for part in parts), sequences.sinks)
        assert torch.equal(paged(alone, block_size).whole()[0], due)
    for size in (1, 5, TILE, 64):
        for chunked, due in zip(paged(sequences, block_size).chunked(size), found, strict=True):
            assert torch.equal(chunked, due), f"chunks of {size}"


def test_numba_values_in_keys_have_the_same_bits_in_many_threads() -> None:
    """There are more threads than tasks, so that they share the heads of a token."""
    sequences = random_sequences(SPECS["parts"], [200, 90], torch.bfloat16)
    due = paged(sequences, 64).chunked(70)
    torch.set_num_threads(5)
    try:
        for _ in range(5):
            for found, expected in zip(paged(sequences, 64).chunked(70), due, strict=True):
                assert torch.equal(found, expected)
            alone = paged(sequences, 64)
            for position in range(90):
                alone.step([(1, position, 1)])
            assert torch.equal(alone.outputs[1], due[1])
    finally:
        torch.set_num_threads(1)


def test_numba_on_amx_computes_chunks_of_values_in_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's fused kernel computes other chunks there. It needs keys as wide as values."""
    monkeypatch.setattr(numba_backend, "fuses_chunks", lambda device: True)
    sequences = random_sequences(LATENT, [33, 48, 17], torch.bfloat16)
    run = paged(sequences)
    run.step([(0, 0, 32), (1, 0, 30)])
    run.step([(0, 32, 1), (1, 30, 18), (2, 0, 17)])
    check(sequences, run.outputs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tasks", "threads", "due"),
    [
        (16, 1, 1, 1, 1),
        (16, 1, 1, 2, 2),
        (16, 1, 2, 2, 1),
        (16, 1, 1, 3, 4),
        (16, 1, 1, 99, 16),
        (128, 1, 9, 2, 8),
        (128, 1, 1, 12, 16),
        (17, 1, 4, 2, 17),
        (8, 2, 1, 4, 2),
    ],
)
def test_parts_give_each_thread_heads(
    heads: int, kv_heads: int, tasks: int, threads: int, due: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    spec = AttentionSpec(heads, kv_heads, 32, scale=1.0, value_dim=16)
    assert numba_backend._parts(spec, tasks) == due
    assert numba_backend._parts(replace(spec, value_dim=None), tasks) == 1


@pytest.mark.parametrize(
    "codes", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow)], ids=str
)
def test_numba_values_in_codes_of_keys_match_dense(codes: torch.dtype) -> None:
    """The scale of a key is that of its value, too. Hidden scales may be NaN."""
    sequences = random_sequences(LATENT, [1, 33, SPLIT + 9], torch.bfloat16)
    found = paged(sequences, 64, codes).whole()
    check_close(found, dense(as_stored(sequences, codes)))
    for size in (1, 7):
        for chunked, due in zip(paged(sequences, 64, codes).chunked(size), found, strict=True):
            assert torch.equal(chunked, due)


@pytest.mark.parametrize(
    ("kind", "form"), [(np.float32, AS_FP32), (np.uint16, AS_BF16), (np.uint8, AS_INT8)]
)
def test_transpose_moves_whole_squares(kind: type[np.generic], form: int) -> None:
    @njit
    def transposed(source, target, rows, columns, stride, target_stride):  # type: ignore[no-untyped-def]
        transpose(source, target, rows, columns, stride, target_stride, form)

    source = np.arange(40 * 64).reshape(40, 64).astype(kind)
    target = np.full((64, 35), 7, kind)
    transposed(source.ctypes.data, target.ctypes.data, 32, 17, 64, 35)
    assert np.array_equal(target[:32, :32], source[:32, :32].T)
    assert (target[32:] == 7).all(), "columns beyond those of a square"
    assert (target[:, 32:] == 7).all()


def test_numba_refuses_values_that_are_no_squares_by_name() -> None:
    odd = AttentionSpec(4, 1, 32, scale=1.0, value_dim=24)
    with pytest.raises(ConfigError, match="values of 24 numbers of a key are not a multiple of 16"):
        select_backend([odd], torch.float32, CPU, "numba")
    backend, told = select_backend([odd], torch.float32, CPU)
    assert backend.name == "torch"
    assert "not numba: values of 24 numbers" in told
    assert select_backend([LATENT], torch.float32, CPU)[1] == "numba"
