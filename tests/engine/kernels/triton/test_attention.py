"""The Triton attention kernels against the torch backend, on steps over a paged KV cache.

Blocks without an owner hold NaN (see PagedRun), and so does new memory (see `poisoned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from engine.attention.backend import StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.select import select_backend
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.attention.torch.backend import TorchBackend
from engine.attention.triton import TritonBackend
from engine.errors import ConfigError
from engine.kernels.triton import decode_attention
from engine.kernels.triton.attention_shapes import Features
from engine.kernels.triton.chips import Features as ChipFeatures
from engine.kernels.triton.chips import force
from engine.kernels.triton.decode_attention import MAX_SPLITS, SPLIT, decode_tile, max_splits
from engine.kernels.triton.extend_attention import stages
from tests.support.paged import PagedRun, Sequences, random_sequences
from tests.support.tolerances import check

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
CPU = torch.device("cpu")
PLAIN = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=8**-0.5)
FEATURES = {
    "causal": PLAIN,
    "window-1": replace(PLAIN, window=1),
    "window-20": replace(PLAIN, window=20),
    "softcap": replace(PLAIN, softcap=1.5),
    "gqa-3": AttentionSpec(6, 2, 8, scale=0.3),
    "sinks": AttentionSpec(6, 2, 8, scale=0.3, window=20, has_sinks=True),
    "mqa-17": AttentionSpec(17, 1, 8, scale=0.4, softcap=2.0, window=33),
    "wide": AttentionSpec(2, 1, 512, scale=0.05),
    "values-in-keys": AttentionSpec(18, 1, 40, scale=0.2, value_dim=32),
    "values-are-keys": AttentionSpec(4, 2, 24, scale=0.2, window=33, value_dim=24),
}


class BothBackends:
    """Attends with the kernels and checks each result against the reference on the same cache."""

    name = "both"

    def __init__(self, bias: torch.Tensor | None = None) -> None:
        self.bias = bias

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, layout: StepLayout) -> Any:
        bias, kernels, reference = self.bias, TritonBackend(CPU).plan(layout), TorchBackend()

        class Plan:
            def attend(
                self, spec: AttentionSpec, kv: Any, *given: Any, sinks: torch.Tensor | None = None
            ) -> torch.Tensor:
                exact = [None if x is None else x.float() for x in given]  # no rounding between ops
                values = None if kv is None or kv.values is None else kv.values.float()
                copy = kv and LayerKV(kv.keys.float(), values, kv.group)
                due = reference.plan(layout).attend(spec, copy, *exact, bias, sinks)
                found = kernels.attend(spec, kv, *given, bias, sinks)
                check(found, due.to(found.dtype))
                assert kv is None or equal(kv.keys.float(), copy.keys)
                if values is not None:
                    assert equal(kv.values.float(), values)
                return found

        return Plan()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    return torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def run_of(
    spec: AttentionSpec,
    lengths: Sequence[int],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
) -> PagedRun:
    """Return a run over sequences whose keys and values are already in the cache."""
    sequences = random_sequences(spec, lengths, dtype)
    run = PagedRun(sequences, block_size, backend=BothBackends(bias))
    kv = run.cache.layers[0]
    for blocks, tensors in ((kv.keys, sequences.keys), (kv.values, sequences.values)):
        if blocks is None:  # values are parts of keys
            continue
        for table, tensor in zip(run.tables, tensors, strict=True):
            for block, part in zip(table, tensor.split(block_size), strict=True):
                blocks[block, :, : len(part)] = part.transpose(0, 1)
    return run


def decode_all(run: PagedRun) -> None:
    run.step([(i, length - 1, 1) for i, length in enumerate(run.sequences.lengths)])


@pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES)
@pytest.mark.variants(5)
def test_attention_each_feature_equals_reference(spec: AttentionSpec) -> None:
    """One step has a decode, a chunk of two tokens, a chunk in mid-prompt and a whole prompt."""
    run = run_of(spec, [17, 40, 50, 9])
    run.step([(0, 16, 1), (1, 38, 2), (2, 20, 30), (3, 0, 9)])


@pytest.mark.parametrize(("window", "sees"), [(None, True), (5, True), (20, True), (None, False)])
def test_attention_images_are_seen_both_ways(window: int | None, sees: bool) -> None:
    """The image is longer than a tile of queries; a chunk begins before it, at it or inside it."""
    spec = replace(PLAIN, num_heads=4, window=window, sees_whole_images=sees)
    run = run_of(spec, [71, 80, 68, 3])
    run.sequences = replace(run.sequences, image=(7, 67))
    run.step([(0, 70, 1), (1, 2, 70), (2, 7, 60), (3, 0, 3)])
    run.step([(2, 67, 1), (0, 30, 41), (1, 66, 2)])


def test_sinks_count_once_however_many_splits_a_sequence_has() -> None:
    run = run_of(AttentionSpec(6, 2, 8, scale=0.3, has_sinks=True), [700, 256, 30])
    decode_all(run)


def test_attention_relative_bias_equals_reference() -> None:
    """A unidirectional bias over a prefix, and a bidirectional one without a KV cache."""
    causal = replace(PLAIN, relative=RelativeBias(8, 20, bidirectional=False))
    bias = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    run_of(causal, [40, 50], bias=bias).step([(0, 39, 1), (1, 20, 30)])
    full = replace(PLAIN, kind="full", relative=RelativeBias(8, 20, bidirectional=True))
    whole_texts(random_sequences(full, [1, 40, 7]), bias)


def whole_texts(texts: Sequences, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run encoder attention, whose keys are views of the step's projections, without a KV cache."""
    layout = PagedRun(texts, 16).layout([(i, 0, n) for i, n in enumerate(texts.lengths)])
    parts = map(torch.cat, (texts.queries, texts.keys, texts.values))
    qkv = torch.stack(list(parts), 1)
    return BothBackends(bias).plan(layout).attend(texts.spec, None, *qkv.unbind(1))


@pytest.mark.parametrize("window", [None, 1, 20])
def test_encoder_attention_text_sees_only_itself(window: int | None) -> None:
    """A window reaches equally far to both sides."""
    texts = random_sequences(replace(PLAIN, kind="full", window=window), [9, 70, 1])
    first = Sequences(texts.spec, texts.queries[:1], texts.keys[:1], texts.values[:1])
    assert torch.equal(whole_texts(texts)[:9], whole_texts(first))


def test_cross_attention_decodes_and_chunk_equal_reference() -> None:
    """Every query sees its whole source, whether shorter or longer than the decoder sequence."""
    spec = replace(PLAIN, kind="cross")
    run = run_of(spec, [40, 5, 270], 32)
    answers = random_sequences(spec, [3, 60, 4], seed=1)
    layout = run.layout([(0, 2, 1), (1, 4, 1), (2, 0, 4)])
    sources = [40, 5, 270]
    tables = torch.tensor([(table + [0] * 9)[:9] for table in run.tables])
    group = replace(
        layout.groups[0],
        block_tables=tables,
        key_lens=sources,
        key_lengths=torch.tensor(sources, dtype=torch.int32),
    )
    layout = replace(layout, groups=[group])
    query = torch.cat([answers.queries[0][2:], answers.queries[1][4:5], answers.queries[2]])
    BothBackends().plan(layout).attend(spec, run.cache.layers[0], query, None, None)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_attention_lengths_around_block_size_equal_reference(block_size: int) -> None:
    run = run_of(PLAIN, [1, block_size - 1, block_size, block_size + 1], block_size)
    decode_all(run)
    run.step([(2, 0, block_size), (3, block_size - 1, 2)])


@pytest.mark.parametrize("window", [None, 2, 257, 300])
def test_decode_attention_one_and_several_splits_equal_reference(window: int | None) -> None:
    """Some windows begin in the middle of a split, and some skip whole splits."""
    spec = AttentionSpec(3, 1, 8, scale=8**-0.5, window=window)
    run = run_of(spec, [255, 256, 257, 513, 600, 3], 64)
    assert max_splits(640, window) == {None: 3, 2: 2, 257: 2, 300: 3}[window]
    decode_all(run)
    run.step([(4, 250, 14), (3, 511, 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_in_keys_of_several_splits_equal_reference(dtype: torch.dtype) -> None:
    """The sizes of DeepSeek-V3's rows, and more heads than a program takes."""
    spec = AttentionSpec(20, 1, 576, scale=0.04, value_dim=512)
    run = run_of(spec, [257, 40], 64, dtype)
    decode_all(run)
    run.step([(0, 250, 7)])


def test_decode_attention_beyond_max_splits_uses_larger_splits() -> None:
    """Keys that fill 32 splits of 256, and one key more, which makes splits of 512."""
    spec = AttentionSpec(1, 1, 8, scale=8**-0.5)
    most = SPLIT.value * MAX_SPLITS.value
    run = run_of(spec, [most, most + 1], 128)
    assert max_splits(2 * most, None) == MAX_SPLITS.value
    decode_all(run)


def test_decode_attention_with_fewer_programs_than_splits_equals_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large batch leaves each sequence a few programs, each with several splits."""
    monkeypatch.setattr(decode_attention, "PROGRAMS", 1)
    monkeypatch.setattr(decode_attention, "MIN_SPLIT_PROGRAMS", 2)
    decode_all(run_of(AttentionSpec(2, 1, 8, scale=0.3), [1200, 300], 64))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_head_dims_and_dtypes_equal_reference(head_dim: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(3, 1, head_dim, scale=head_dim**-0.5)
    run = run_of(spec, [18, 70], 64, dtype)
    run.step([(0, 17, 1), (1, 66, 4)])


def test_captured_decode_plan_has_bits_of_eager_plan() -> None:
    """A captured plan has full-width tables and device tensors, but no lengths on the host."""
    run = run_of(replace(PLAIN, window=40), [30, 300, 1], 16)
    decode_all(run)
    layout = run.layout([(i, n - 1, 1) for i, n in enumerate(run.sequences.lengths)])
    (group,) = layout.groups
    wide = torch.nn.functional.pad(group.block_tables, (0, 20))
    groups = [replace(group, block_tables=wide)]
    layout = replace(layout, query_lens=None, seq_lens=None, groups=groups)
    query = torch.cat([q[-1:] for q in run.sequences.queries])
    plan = TritonBackend(CPU).plan(layout)
    found = plan.attend(run.sequences.spec, run.cache.layers[0], query, None, None)
    assert torch.equal(found, torch.cat([output[-1:] for output in run.outputs]))


@pytest.mark.parametrize("window", [None, 40])
def test_captured_mixed_plan_has_bits_of_eager_plan(window: int | None) -> None:
    """Padding is a decode of the null block, empty sequences, and tokens without a sequence.

    Each real token has the same bits as in a step planned from the host's lists. The output of the
    padding is zero.
    """
    run = run_of(replace(PLAIN, window=window), [30, 300, 70, 20], 16)
    decode_all(run)
    run.step([(2, 50, 20), (3, 0, 20)])
    due = [run.outputs[0][-1:], run.outputs[1][-1:], run.outputs[2][50:], run.outputs[3]]
    layout = run.layout([(0, 29, 1), (1, 299, 1), (2, 50, 20), (3, 0, 20)])
    (group,) = layout.groups
    tables = torch.zeros(6, group.block_tables.shape[1] + 20, dtype=torch.int64)
    tables[[0, 1, 3, 4], :-20] = group.block_tables
    layout = replace(
        layout,
        num_decodes=3,
        query_lens=None,
        seq_lens=None,
        lengths=torch.tensor([30, 300, 1, 70, 20, 1], dtype=torch.int32),
        query_starts=torch.tensor([0, 1, 2, 3, 23, 43, 43], dtype=torch.int32),
        groups=[replace(group, block_tables=tables)],
    )
    queries = run.sequences.queries
    padding = torch.ones_like(queries[0][:21])
    real = [queries[0][-1:], queries[1][-1:], padding[:1], queries[2][50:], queries[3]]
    query = torch.cat([*real, padding[1:]])
    plan = TritonBackend(CPU).plan(layout)
    found = plan.attend(run.sequences.spec, run.cache.layers[0], query, None, None)
    assert torch.equal(torch.cat([found[:2], found[3:43]]), torch.cat(due))
    assert not found[43:].any()


def test_attention_bits_do_not_depend_on_batch_or_chunks() -> None:
    spec, lengths = AttentionSpec(6, 2, 8, scale=0.3), [300, 20, 270]
    together, alone, chunked = (run_of(spec, lengths, 32) for _ in range(3))
    decode_all(together)
    together.step([(0, 100, 60), (2, 0, 44), (1, 0, 19)])
    alone.step([(0, 299, 1)])
    alone.step([(0, 100, 60)])
    assert torch.equal(together.outputs[0][100:160], alone.outputs[0][100:160])
    assert torch.equal(together.outputs[0][299], alone.outputs[0][299])
    for first in range(100, 160, 12):
        chunked.step([(0, first, 12)])
    assert torch.equal(chunked.outputs[0][100:160], alone.outputs[0][100:160])


def test_extend_attention_longest_first_has_the_bits_of_tiles_in_order() -> None:
    found = []
    for longest_first in (False, True):
        force(ChipFeatures(longest_first=longest_first))
        try:
            run = run_of(AttentionSpec(6, 2, 64, scale=0.1), [300, 20, 270], 32)
            run.step([(0, 100, 200), (1, 0, 20), (2, 30, 70)])
        finally:
            force(None)
        found.append(torch.cat(run.outputs).nan_to_num(9e9))
    assert torch.equal(*found)


def test_decode_attention_without_keys_returns_zeros() -> None:
    """Otherwise the padding rows of a graph could become NaN."""
    out, query = torch.empty(2, 2, 8), torch.ones(2, 2, 8)
    keys = torch.full((1, 2, 16, 8), float("nan"))
    lengths, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    decode_attention.decode_attention(out, query, keys, keys, tables, lengths, Features(1.0))
    assert not out.any()


def test_select_backend_names_choice_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection by device and by flag, with the reason of every refusal."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    wide = replace(PLAIN, head_dim=520)
    gpu = torch.device("cuda")
    for device, spec, wanted, due in (
        (CPU, PLAIN, "auto", "numba"),
        (CPU, PLAIN, "torch", "torch"),
        (gpu, PLAIN, "auto", "triton"),
        (gpu, PLAIN, "torch", "torch"),
        (gpu, wide, "auto", "torch (not triton: head_dim 520 is above the maximum of 512)"),
        (gpu, AttentionSpec(16, 1, 576, scale=1.0, value_dim=512), "auto", "triton"),
    ):
        backend, told = select_backend([PLAIN, spec], torch.float32, device, wanted)
        assert told == due
        assert backend.name == due.split()[0]
    for device, spec, dtype, why in (
        (CPU, PLAIN, torch.float32, "needs a GPU, not cpu"),
        (gpu, wide, torch.float32, "head_dim 520 is above the maximum of 512"),
        (gpu, PLAIN, torch.float64, "not torch.float64"),
        (gpu, replace(PLAIN, head_dim=700, value_dim=512), torch.float32, "keys have 188 numbers"),
        (gpu, replace(PLAIN, head_dim=700, value_dim=600), torch.float32, "head_dim 600 is above"),
    ):
        with pytest.raises(ConfigError, match=rf"{why}.* Use --attention-backend auto"):
            select_backend([spec], dtype, device, "triton")


def test_stages_of_wide_heads_fit_small_shared_memory() -> None:
    """For sm_86, sm_89 and sm_120, four stages compile to 68 KiB and five to 101 KiB.

    In fp32, three stages of heads of 512 compile to 97 KiB.
    """
    small, large, biased = 101376, 166912, Features(1.0, bias=torch.zeros(1, 3))
    plain, half = Features(1.0), torch.bfloat16
    for dim in (256, 512):
        assert [stages(dim, half, plain, chip) for chip in (small, large, None)] == [4, 5, 5]
    assert [stages(128, half, plain, chip) for chip in (small, large)] == [5, 5]
    assert stages(64, half, biased, small) == 2
    for tile in (decode_tile(512, torch.float32).stages, stages(512, torch.float32, plain, small)):
        assert tile == 3


def test_triton_backend_refuses_bf16_on_gpu_that_emulates_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a GPU also has too little shared memory for bf16 tiles and would fail after startup."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
    backend = TritonBackend(torch.device("cuda"))
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **_: native)
        assert backend.refuses(spec, torch.float32) is None
        assert (backend.refuses(spec, torch.bfloat16) is None) == native
