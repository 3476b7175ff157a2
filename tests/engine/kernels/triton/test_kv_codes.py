"""The Triton kernels over keys and values that are codes, in the interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

from engine.attention.spec import AttentionSpec
from engine.attention.torch.backend import TorchBackend
from engine.attention.triton import TritonBackend
from tests.support.kv_codes import (
    as_stored,
    attend_to_source,
    check_close,
    check_stored,
    heads,
)
from tests.support.paged import PagedRun, Sequences, dense, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
CPU = torch.device("cpu")
PLAIN = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=8**-0.5)
SPECS = {
    "window": replace(PLAIN, window=20),
    "softcap": replace(PLAIN, softcap=1.5),
    "gqa-3": AttentionSpec(6, 2, 8, scale=0.3),
    "odd-width": AttentionSpec(3, 1, 20, scale=0.3),
    "values-in-keys": AttentionSpec(3, 1, 24, scale=0.3, value_dim=16),
}
codes = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def run_of(sequences: Sequences, codes: torch.dtype) -> PagedRun:
    return PagedRun(sequences, 16, backend=TritonBackend(CPU), kv_dtype=codes)


@pytest.mark.variants(2)
@codes
@dtypes
def test_stored_codes_equal_their_definition(dtype: torch.dtype, codes: torch.dtype) -> None:
    numbers = heads(dtype)
    sequences = Sequences(
        AttentionSpec(2, 2, 16, scale=0.25),
        [torch.zeros_like(numbers)],
        [numbers],
        [numbers.flip(0)],
    )
    run = PagedRun(sequences, 64, backend=TritonBackend(CPU), kv_dtype=codes)
    run.chunked(20)
    check_stored(run, numbers, numbers.flip(0), codes)


# The pairs of dtype and codes that a feature is tested with in `make test`; gqa-3 has all.
QUICK = {
    "window": (torch.bfloat16, torch.float8_e4m3fn),
    "softcap": (torch.float32, torch.int8),
    "odd-width": (torch.bfloat16, torch.int8),
    "values-in-keys": (torch.float32, torch.float8_e4m3fn),
}


def pairs_of_features() -> list[ParameterSet]:
    every = itertools.product(
        SPECS, (torch.float32, torch.bfloat16), (torch.int8, torch.float8_e4m3fn)
    )
    return [
        pytest.param(*one, marks=() if QUICK.get(one[0], one[1:]) == one[1:] else pytest.mark.slow)
        for one in every
    ]


@pytest.mark.variants(3)
@pytest.mark.parametrize(("feature", "dtype", "codes"), pairs_of_features(), ids=str)
def test_attention_sees_rounded_keys_and_values(
    feature: str, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """In chunks and as decodes, also of the keys that the step itself computes."""
    sequences = random_sequences(SPECS[feature], [5, 40, 18], dtype)
    run = run_of(sequences, codes)
    run.step([(0, 0, 4), (1, 0, 39), (2, 0, 10)])
    run.step([(0, 4, 1), (1, 39, 1), (2, 10, 8)])
    check_close(run.outputs, dense(as_stored(sequences, codes)))


@codes
def test_decode_of_several_splits_equals_dense(codes: torch.dtype) -> None:
    sequences = random_sequences(SPECS["gqa-3"], [600])
    run = run_of(sequences, codes)
    everything = TorchBackend().plan(run.layout([(0, 0, 600)]))
    everything.store(run.cache.layers[0], sequences.keys[0], sequences.values[0])
    run.step([(0, 599, 1)])
    due = dense(as_stored(sequences, codes))
    check_close([run.outputs[0][-1:]], [due[0][-1:]])


@pytest.mark.variants(1)
@codes
def test_bits_do_not_depend_on_batch_or_chunks(codes: torch.dtype) -> None:
    sequences = random_sequences(SPECS["gqa-3"], [42, 20])
    together, chunked = run_of(sequences, codes), run_of(sequences, codes)
    together.whole()
    for first in range(0, 42, 14):
        chunked.step([(0, first, 14)])
    assert torch.equal(chunked.outputs[0], together.outputs[0])


@codes
def test_cross_layer_reads_codes_of_its_source(codes: torch.dtype) -> None:
    sequences = random_sequences(replace(PLAIN, kind="cross"), [20])
    found = attend_to_source(sequences, TritonBackend(CPU), codes)
    check_close([found], dense(as_stored(sequences, codes)))
