"""Keys and values as codes: their bits by definition, and attention over them in every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import KVCache, block_bytes, write_parts
from engine.attention.numba import NumbaBackend
from engine.attention.spec import AttentionSpec
from engine.attention.torch.backend import TorchBackend
from engine.attention.torch.fused import FusedAttention
from engine.kernels.numba.call import TILE
from engine.ops.kv_codes import from_codes, to_codes
from tests.engine.attention.test_torch import FEATURES, LENGTHS, PLAIN
from tests.support.kv_codes import (
    as_bytes,
    as_stored,
    attend_to_source,
    by_definition,
    check_close,
    check_stored,
    heads,
)
from tests.support.paged import PagedRun, Sequences, dense, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
CODES = [torch.int8, FP8]
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "torch": TorchBackend,
    "numba": lambda: NumbaBackend(CPU),
}
codes = pytest.mark.parametrize("codes", CODES, ids=["int8", "fp8"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


# ---- the codes -------------------------------------------------------------------------------


@codes
@dtypes
def test_to_codes_equals_its_definition(codes: torch.dtype, dtype: torch.dtype) -> None:
    numbers = heads(dtype)
    found, scales = to_codes(numbers, codes)
    due, due_scales = by_definition(numbers.float().numpy(), codes)
    assert np.array_equal(scales.numpy(), due_scales)
    assert np.array_equal(as_bytes(found), due)
    assert found.dtype == codes


@codes
def test_from_codes_is_within_half_a_code(codes: torch.dtype) -> None:
    numbers = heads(torch.float32)
    back = torch.empty_like(numbers)
    found, scales = to_codes(numbers, codes)
    from_codes(found, scales, back)
    error = (back - numbers).abs()
    if codes == torch.int8:
        assert (error <= 0.501 * scales[..., None]).all()
    else:
        assert (error <= numbers.abs() / 15.9 + scales[..., None] / 1000).all()
    assert (back != 0).any()


@codes
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_head_with_number_that_is_not_finite_stays_so(codes: torch.dtype, broken: float) -> None:
    numbers = torch.ones(3, 2, 8)
    numbers[1, 1, 4] = broken
    back = torch.empty_like(numbers)
    from_codes(*to_codes(numbers, codes), back)
    assert not back[1, 1].isfinite().any()
    assert back[[0, 2]].isfinite().all()
    assert back[1, 0].isfinite().all()


# ---- what backends store ---------------------------------------------------------------------


def run_of(
    sequences: Sequences, size: int, backend: Callable[[], AttentionBackend], codes: torch.dtype
) -> PagedRun:
    return PagedRun(sequences, size, backend=backend(), kv_dtype=codes)


@codes
@dtypes
@backends
def test_backend_stores_codes_of_the_definition(
    backend: Callable[[], AttentionBackend], dtype: torch.dtype, codes: torch.dtype
) -> None:
    numbers = heads(dtype)
    spec = AttentionSpec(2, 2, 16, scale=0.25)
    queries = torch.zeros_like(numbers)
    sequences = Sequences(spec, [queries], [numbers], [numbers.flip(0)])
    run = run_of(sequences, 64, backend, codes)
    run.chunked(7)
    check_stored(run, numbers, numbers.flip(0), codes)


# ---- attention -------------------------------------------------------------------------------


SPECS = {name: spec for name, spec in FEATURES.items() if spec.kind == "causal"}


@codes
@dtypes
@backends
@pytest.mark.parametrize("name", ["gqa-3", "softcap-window"])
def test_attention_sees_rounded_keys_and_values(
    name: str, backend: Callable[[], AttentionBackend], dtype: torch.dtype, codes: torch.dtype
) -> None:
    """Also in the step that computes them. A chunk that saw fresh keys would differ."""
    spec = SPECS[name]
    sequences = random_sequences(spec, LENGTHS, dtype)
    due = dense(as_stored(sequences, codes))
    check_close(run_of(sequences, 16, backend, codes).whole(), due)
    check_close(run_of(sequences, 16, backend, codes).chunked(7), due)
    unrounded = dense(sequences)
    differences = [
        float((one - other).abs().max()) for one, other in zip(due, unrounded, strict=True)
    ]
    assert max(differences) > 1e-3, "the keys are rounded"


@codes
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_bits_do_not_depend_on_step(backend: str, codes: torch.dtype) -> None:
    """A sequence alone, in a batch, in chunks of several sizes, and as decodes."""
    spec = AttentionSpec(6, 2, 64, scale=0.125)
    sequences = random_sequences(spec, [1, 63, 130], torch.bfloat16)
    together = run_of(sequences, 64, BACKENDS[backend], codes).whole()
    for index, due in enumerate(together):
        parts = (sequences.queries, sequences.keys, sequences.values)
        alone = Sequences(spec, *([part[index]] for part in parts))
        assert torch.equal(run_of(alone, 64, BACKENDS[backend], codes).whole()[0], due)
    for size in (1, 5, TILE, 100):
        found = run_of(sequences, 64, BACKENDS[backend], codes).chunked(size)
        for one, due in zip(found, together, strict=True):
            assert torch.equal(one, due), f"chunks of {size}"


@codes
def test_numba_on_amx_computes_chunks_over_codes(
    codes: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.numba.fuses_chunks", lambda device: True)
    monkeypatch.setattr(FusedAttention, "supports", staticmethod(lambda *given: True))
    sequences = random_sequences(AttentionSpec(4, 2, 64, scale=0.125), [40, 70], torch.bfloat16)
    found = run_of(sequences, 16, BACKENDS["numba"], codes).chunked(30)
    check_close(found, dense(as_stored(sequences, codes)))


@codes
@backends
def test_nan_key_reaches_only_queries_that_see_it(
    backend: Callable[[], AttentionBackend], codes: torch.dtype
) -> None:
    sequences = random_sequences(SPECS["gqa-3"], [30])
    sequences.keys[0][20, 1, 3] = float("nan")
    run = run_of(sequences, 16, backend, codes)
    (found,) = run.chunked(1)
    assert found[20:, 3:].isnan().all()
    assert found[:20].isfinite().all()
    assert found[:, :3].isfinite().all()


@codes
def test_nan_value_of_chunk_reaches_only_queries_that_see_it(codes: torch.dtype) -> None:
    """Tokens 20 and 21 share a tile, and only one of them sees the value."""
    sequences = random_sequences(SPECS["gqa-3"], [30])
    sequences.values[0][21, 1, 3] = float("nan")
    (found,) = run_of(sequences, 16, BACKENDS["numba"], codes).whole()
    assert found[21:, 3:].isnan().all()
    assert found[:21].isfinite().all()
    assert found[:, :3].isfinite().all()


@codes
def test_cross_layer_reads_codes_of_its_source(codes: torch.dtype) -> None:
    """A source's keys are stored by themselves, and then read by other queries."""
    spec = replace(PLAIN, kind="cross")
    sequences = random_sequences(spec, [20])
    found = attend_to_source(sequences, TorchBackend(), codes)
    check_close([found], dense(as_stored(sequences, codes)))


# ---- the cache -------------------------------------------------------------------------------


@codes
def test_cache_of_codes_has_planned_bytes(codes: torch.dtype) -> None:
    specs = [PLAIN, AttentionSpec(4, 1, 32, scale=1.0)]
    cache = KVCache(specs, 5, 16, codes, CPU)
    assert cache.num_bytes == 6 * block_bytes(specs, 16, codes)
    # A slot holds one wide layer, or two narrow ones. Each shape has scales of its own.
    assert block_bytes(specs, 16, codes) == 16 * 2 * (32 + 1 * 4 + 2 * 2 * 4)
    large = [AttentionSpec(4, 2, 128, scale=1.0)]
    assert 1.9 < block_bytes(large, 16, torch.bfloat16) / block_bytes(large, 16, codes) < 2


@codes
@pytest.mark.parametrize("is_transposed", [False, True])
def test_copied_and_scrubbed_blocks_include_scales(codes: torch.dtype, is_transposed: bool) -> None:
    cache = KVCache([PLAIN], 4, 16, codes, CPU)
    (kv,) = cache.layers
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    for stored in (kv.keys, kv.values):
        stored.view(torch.uint8).random_(0, 0x7F)
    for scales in (kv.key_scales, kv.value_scales):
        scales.uniform_(1, 2)
        scales[3] = float("nan")
    before = kv.key_scales.clone(), kv.value_scales.clone(), kv.values.view(torch.uint8).clone()
    write_parts(cache.read_parts(0, [1], [3], [5], transposed_keys=is_transposed))
    for scales, was in zip((kv.key_scales, kv.value_scales), before, strict=False):
        assert torch.equal(scales[3, :, :5], was[1, :, :5])
        assert not scales[3, :, 5:].any()
        assert torch.equal(scales[[1, 2, 4]], was[[1, 2, 4]])
    values = kv.values.view(torch.uint8)
    assert torch.equal(values[3, :, :5], before[2][1, :, :5])
    assert not values[3, :, 5:].any()
    cache.scrub([2])
    for tensor in (kv.keys.view(torch.uint8), values, kv.key_scales, kv.value_scales):
        assert not tensor[2].any()
        assert tensor[1].any()
