"""Numba's attention kernels: they match dense attention, and a token's bits never change."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numba import njit

from engine.attention import numba as numba_backend
from engine.attention.kv_cache import LayerKV
from engine.attention.numba import NumbaBackend, attention_form
from engine.attention.select import select_backend
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.attention.torch.fused import FusedAttention
from engine.device.openmp import parallel
from engine.errors import ConfigError
from engine.kernels.numba.call import IN_PAIRS, TILE
from engine.kernels.numba.cpu import has_avx512, has_avx512_bf16
from engine.kernels.numba.machine_code import KernelStore
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import to_element
from tests.engine.attention.test_torch import FEATURES as EVERY_FEATURE
from tests.engine.attention.test_torch import LENGTHS, PLAIN, TOLERANCE, check, check_image
from tests.engine.ops.test_invariance import noisy_scores, noisy_values
from tests.support.paged import PagedRun, Sequences, dense, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def paged(sequences: Sequences, block_size: int) -> PagedRun:
    """Return a run with the Numba backend. Unowned blocks hold NaN, which shows invalid reads."""
    return PagedRun(sequences, block_size, backend=NumbaBackend(CPU))


# ---- correctness -----------------------------------------------------------------------------

MQA_9 = AttentionSpec(9, 1, 8, scale=8**-0.5, softcap=2.0, window=20)  # more than a tile's rows
FEATURES = {name: spec for name, spec in EVERY_FEATURE.items() if spec.kind == "causal"}


@dtypes
@pytest.mark.parametrize("spec", [*FEATURES.values(), MQA_9], ids=[*FEATURES, "mqa-9"])
def test_numba_each_feature_matches_dense(spec: AttentionSpec, dtype: torch.dtype) -> None:
    sequences = random_sequences(spec, LENGTHS, dtype)
    check(sequences, paged(sequences, 16).whole())
    for size in (1, 7):
        check(sequences, paged(sequences, 16).chunked(size))


@dtypes
@pytest.mark.parametrize("window", [None, 5, 16])
def test_numba_image_matches_dense(window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(6, 2, 8, scale=8**-0.5, window=window, sees_whole_images=True)
    check_image(random_sequences(spec, [40, 28, 30], dtype), NumbaBackend(CPU))


SHAPES = {  # heads, kv heads, head_dim, block size, dtype
    "one-row": (2, 2, 64, 64, torch.bfloat16),
    "many-rows": (18, 2, 64, 32, torch.bfloat16),
    "odd-width": (4, 2, 80, 64, torch.bfloat16),
    "eight-lanes": (4, 2, 72, 16, torch.float32),
    "wide": (2, 1, 256, 16, torch.float32),
    "large-blocks": (4, 2, 32, 128, torch.float32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_numba_shapes_match_dense(shape: tuple[int, int, int, int, torch.dtype]) -> None:
    heads, kv_heads, dim, size, dtype = shape
    spec = AttentionSpec(heads, kv_heads, dim, scale=dim**-0.5)
    lengths = [1, TILE, TILE + 1, size - 1, size, size + 1, 2 * size + TILE + 1]
    sequences = random_sequences(spec, lengths, dtype)
    run = paged(sequences, size)
    run.step([(i, 0, n - 1) for i, n in enumerate(lengths) if n > 1])
    run.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
    check(sequences, run.outputs)


@pytest.mark.skipif(not has_avx512_bf16(), reason="this CPU does not multiply bf16")
def test_numba_weights_of_bf16_add_little_error() -> None:
    """Weights are rounded to bf16, as the output is in any case."""
    spec = AttentionSpec(9, 3, 64, scale=0.125)
    assert attention_form(torch.bfloat16, torch.bfloat16) == IN_PAIRS
    sequences = random_sequences(spec, [1000, 300], torch.bfloat16)
    parts = (sequences.queries, sequences.keys, sequences.values)
    wide = Sequences(spec, *([each.double() for each in part] for part in parts))
    due = torch.cat([each.flatten() for each in dense(wide)])
    found = torch.cat([each.flatten() for each in paged(sequences, 64).whole()])
    rounding = (due.bfloat16() - due).square().mean().sqrt()
    error = (found.double() - due).square().mean().sqrt()
    assert error < 1.2 * rounding


def test_numba_mixed_step_matches_dense() -> None:
    lengths = [33, 5, 48, 17, 64, 40]
    sequences = random_sequences(FEATURES["gqa-3"], lengths)
    run = paged(sequences, 16)
    run.step([(0, 0, 32), (1, 0, 4), (2, 0, 10), (3, 0, 16)])
    run.step([(0, 32, 1), (1, 4, 1), (2, 10, 30), (3, 16, 1), (4, 0, 64)])
    run.step([(2, 40, 8), (5, 0, 1)])
    run.step([(5, 1, 39)])
    check(sequences, run.outputs)


def test_numba_strided_inputs_equal_contiguous() -> None:
    """In a model, queries, keys and values are slices of one tensor."""
    spec = FEATURES["gqa-3"]
    sequences = random_sequences(spec, [20])
    both = torch.cat([part[0] for part in (sequences.queries, sequences.keys, sequences.values)], 1)
    run = paged(sequences, 16)
    plan, kv = run.backend.plan(run.layout([(0, 0, 20)])), run.cache.layers[0]
    found = plan.attend(spec, kv, both[:, :6], both[:, 6:8], both[:, 8:])
    assert torch.equal(found, paged(sequences, 16).whole()[0])
    transposed = kv.keys[run.tables[0][0]].view(2, 8, 16)
    assert torch.equal(transposed, sequences.keys[0][:16].permute(1, 2, 0))
    apart = torch.stack([both, both], 2)[:, :, 0]  # the heads of a token are not contiguous
    found = plan.attend(spec, kv, apart[:, :6], apart[:, 6:8], apart[:, 8:])
    assert torch.equal(found, paged(sequences, 16).whole()[0])


@pytest.mark.parametrize("before", [16, 23, 31])
def test_numba_block_shared_in_step_that_fills_it_matches_dense(before: int) -> None:
    """The last key is in a chunk, alone in its tile, or a decode. The reader's task comes first."""
    sequences = random_sequences(PLAIN, [32, 33])
    for part in (sequences.queries, sequences.keys, sequences.values):
        part[1][:32] = part[0]
    run = paged(sequences, 16)
    run.tables[1][:2] = run.tables[0]
    run.step([(0, 0, before)])
    run.step([(1, 32, 1), (0, before, 32 - before)])
    due = dense(sequences)
    torch.testing.assert_close(run.outputs[1][32:].double(), due[1][32:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.outputs[0].double(), due[0], rtol=1e-5, atol=1e-5)


# ---- with AMX --------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend to have AMX. Returns the number of sequences in each call of torch's kernel."""
    calls: list[int] = []

    def supports(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.bfloat16 and not spec.softcap

    def attend(self: FusedAttention, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        calls.append(self.num_sequences)
        return compute(self, kv, query)

    compute = FusedAttention.__call__
    monkeypatch.setattr(numba_backend, "fuses_chunks", lambda device: True)
    monkeypatch.setattr(FusedAttention, "supports", supports)
    monkeypatch.setattr(FusedAttention, "__call__", attend)
    return calls


MATRIX = {
    "causal": AttentionSpec(6, 2, 64, scale=0.125),
    "window": AttentionSpec(4, 4, 32, scale=0.2, window=20),
}


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("spec", MATRIX.values(), ids=MATRIX)
def test_numba_on_amx_torch_computes_chunks(
    spec: AttentionSpec, size: int, fused: list[int]
) -> None:
    """Steps of chunks, of decodes and of both, including a chunk of one token."""
    lengths = [33, 5, 48, 17, 100, 70, 1]
    sequences = random_sequences(spec, lengths, torch.bfloat16)
    run = paged(sequences, size)
    assert run.backend.reads_masked_keys
    run.step([(0, 0, 32), (1, 0, 4), (2, 0, 10), (3, 0, 16)])
    assert sum(fused) == 4
    run.step([(0, 32, 1), (1, 4, 1), (2, 10, 30), (3, 16, 1), (4, 0, 99)])
    assert sum(fused) == 6
    run.step([(6, 0, 1), (4, 99, 1)])
    assert sum(fused) == 6
    run.step([(2, 40, 8), (5, 0, 1)])
    run.step([(5, 1, 69)])
    check(sequences, run.outputs)


def test_numba_on_amx_torch_computes_one_token_chunk(fused: list[int]) -> None:
    """The chunk is the rest of a prompt. Only torch's kernel may compute it."""
    sequences = random_sequences(MATRIX["causal"], [40, 31], torch.bfloat16)
    run = paged(sequences, 16)
    plan, kv = NumbaBackend(CPU).plan(run.layout([(0, 0, 40), (1, 0, 1)])), run.cache.layers[0]
    parts = (sequences.queries, sequences.keys, sequences.values)
    found = plan.attend(MATRIX["causal"], kv, *(torch.cat((p[0], p[1][:1])) for p in parts))
    assert sum(fused) == 2
    right = dense(sequences)
    torch.testing.assert_close(found[:40].double(), right[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[40:].double(), right[1][:1], rtol=2e-2, atol=2e-2)


def test_numba_on_amx_computes_softcap_layers(fused: list[int]) -> None:
    sequences = random_sequences(replace(MATRIX["causal"], softcap=2.0), [40], torch.bfloat16)
    check(sequences, paged(sequences, 16).whole())
    assert not fused


# ---- equal bits ------------------------------------------------------------------------------

ROWS = {
    "gqa-3": AttentionSpec(6, 2, 64, scale=0.125),
    "one-row": AttentionSpec(2, 2, 64, scale=0.125, window=50),
    "softcap": AttentionSpec(8, 2, 8, scale=0.3, softcap=4.0),
}


@pytest.mark.variants(8)
@dtypes
@pytest.mark.parametrize("kind", [None, noisy_scores, noisy_values])
@pytest.mark.parametrize("spec", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_numba_bits_do_not_depend_on_step(
    spec: AttentionSpec,
    block_size: int,
    kind: Callable[[Sequences], Sequences] | None,
    dtype: torch.dtype,
) -> None:
    """A sequence alone, in a batch, in chunks of several sizes, and as decodes."""
    lengths = [1, block_size - 1, 130, 200]
    sequences = random_sequences(spec, lengths, dtype)
    sequences = kind(sequences) if kind else sequences
    together = paged(sequences, block_size).whole()
    assert any(output.any() for output in together)
    for index, due in enumerate(together):
        parts = (sequences.queries, sequences.keys, sequences.values)
        alone = Sequences(sequences.spec, *([part[index]] for part in parts))
        assert torch.equal(paged(alone, block_size).whole()[0], due)
    for size in (1, 5, TILE, 64, 100):
        for found, due in zip(paged(sequences, block_size).chunked(size), together, strict=True):
            assert torch.equal(found, due), f"chunks of {size}"


def test_numba_in_many_threads_is_bitwise_equal() -> None:
    """There are more threads than cores, and tasks have different lengths."""
    spec = AttentionSpec(6, 2, 64, scale=0.125)
    sequences = random_sequences(spec, [200, 3, 90, 64, 1, 150], torch.bfloat16)
    due = paged(sequences, 64).chunked(70)
    torch.set_num_threads(4)
    try:
        for _ in range(20):
            for found, expected in zip(paged(sequences, 64).chunked(70), due, strict=True):
                assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(1)


# ---- numbers ---------------------------------------------------------------------------------


def test_exp2_is_accurate_and_bounded_below() -> None:
    """Error below two units in the last place; 1 at zero; never below 2**-126."""

    @njit
    def powers(x, y):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            y[i] = exp2(x[i])

    x = np.concatenate([np.linspace(-126, 0, 1_000_001), -np.geomspace(1e-30, 126, 100_000)])
    x = x.astype(np.float32)
    found = np.empty_like(x)
    powers(x, found)
    due = np.exp2(x.astype(np.float64))
    assert np.abs(found / due - 1).max() < 2 * 2**-23
    edges = np.array([0, -0.0, -126, -127, -1e30, -np.inf, np.nan], np.float32)
    found = np.empty_like(edges)
    powers(edges, found)
    assert found[:6].tolist() == [1, 1, *[2.0**-126] * 4]
    assert np.isnan(found[6])


def test_to_element_rounds_to_bf16_like_torch() -> None:
    @njit
    def rounded(x, y):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            y[i] = to_element(x[i], y)

    bits = torch.randint(
        -(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0)
    )
    ties = torch.arange(2**16) * 2**16 + 2**15  # halfway between two bf16 values
    x = torch.cat([bits, ties - 2**31]).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    found = np.empty(len(x), np.uint16)
    rounded(x.numpy(), found)
    assert torch.equal(torch.from_numpy(found).view(torch.bfloat16), x.bfloat16())


@dtypes
def test_numba_nan_key_reaches_only_queries_that_see_it(dtype: torch.dtype) -> None:
    """A NaN key makes the outputs of the queries that see it NaN, and no others."""
    sequences = random_sequences(FEATURES["gqa-3"], [30], dtype)
    sequences.keys[0][20, 1, 3] = float("nan")
    (found,) = paged(sequences, 16).whole()
    assert found[20:, 3:].isnan().all()
    assert found[:20].isfinite().all()
    assert found[:, :3].isfinite().all()


# ---- refusals and the cache of machine code --------------------------------------------------


def test_select_numba_unsupported_layer_raises_config_error() -> None:
    specs = {
        replace(PLAIN, kind="cross"): "no cross layers",
        replace(PLAIN, relative=RelativeBias(8, 20, False)): "no bias",
        replace(PLAIN, head_dim=20): "head_dim 20 is not a multiple of 8",
    }
    for spec, why in specs.items():
        with pytest.raises(ConfigError, match=rf"{why}.* Use --attention-backend auto"):
            select_backend([PLAIN, spec], torch.float32, CPU, "numba")
    with pytest.raises(ConfigError, match=r"not torch\.float16"):
        select_backend([PLAIN], torch.float16, CPU, "numba")
    with pytest.raises(ConfigError, match="needs a CPU, not cuda"):
        select_backend([PLAIN], torch.float32, torch.device("cuda"), "numba")
    backend, told = select_backend([PLAIN], torch.bfloat16, CPU, "numba")
    assert backend.name == told == "numba"
    assert select_backend([PLAIN], torch.bfloat16, CPU)[1] == "numba"
    backend, told = select_backend([PLAIN, replace(PLAIN, head_dim=20)], torch.float32, CPU)
    assert (backend.name, told) == (
        "torch",
        "torch (not numba: head_dim 20 is not a multiple of 8)",
    )


def test_select_numba_not_installed_raises_config_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba_backend, "kernel_store", lambda: KernelStore(tmp_path))
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match="not installed: pip install 'numba'"):
        select_backend([PLAIN], torch.float32, CPU, "numba")
    name, told = select_backend([PLAIN], torch.float32, CPU)
    assert name.name == "torch"
    assert told.startswith("torch (not numba: it needs numba")


def test_select_numba_import_error_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Numba then raises ImportError; an empty module simulates it here."""
    monkeypatch.setitem(sys.modules, "engine.attention.numba", ModuleType("empty"))
    with pytest.raises(ConfigError, match="it cannot be imported: cannot import name"):
        select_backend([PLAIN], torch.float32, CPU, "numba")


def test_select_numba_without_openmp_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(numba_backend, "parallel", parallel.__wrapped__)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(ConfigError, match="a torch build that uses OpenMP threads"):
        select_backend([PLAIN], torch.float32, CPU, "numba")


@pytest.mark.slow
@pytest.mark.skipif(not has_avx512(), reason="without AVX-512, all tests here cover this already")
def test_numba_without_avx512_passes(tmp_path: Path) -> None:
    """Without AVX-512, kernels use vectors of eight lanes."""
    environment = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    tile = "engine.kernels.numba.source.sum_tiles import register_tile"
    narrow = f"from {tile}; print(register_tile().lanes)"
    assert python(environment, "-c", narrow).stdout.split() == ["8"]
    some = "shapes_match_dense or depend and gqa-3 and scores and 64"
    ran = python(environment, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", some)
    assert ran.returncode == 0, ran.stdout


def python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, in the repository's root folder."""
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
