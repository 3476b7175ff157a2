"""Triton's attention against the torch backend, the reference, on steps over a paged cache.

Blocks that belong to nobody hold NaN (see PagedRun), as does fresh memory (see `poisoned`).
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
from engine.attention.selection import select_backend
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.errors import ConfigError
from engine.kernels import decode_attention
from engine.kernels.attention_tiles import Features
from engine.kernels.decode_attention import MAX_SPLITS, SPLIT, max_splits
from engine.kernels.extend_attention import stages
from tests.kernels.tolerances import check
from tests.ops.paged import PagedRun, Sequences, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
CPU = torch.device("cpu")
PLAIN = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=8**-0.5)
FEATURES = {
    "causal": PLAIN,
    "window-1": replace(PLAIN, window=1),
    "window-20": replace(PLAIN, window=20),
    "softcap": replace(PLAIN, softcap=1.5),
    "gqa-3": AttentionSpec(6, 2, 8, scale=0.3),
    "mqa-17": AttentionSpec(17, 1, 8, scale=0.4, softcap=2.0, window=33),
}


class BothBackends:
    """Attends by the kernels, and holds each result against the reference's on the same cache."""

    name = "both"

    def __init__(self, bias: torch.Tensor | None = None) -> None:
        self.bias = bias

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, layout: StepLayout) -> Any:
        bias, kernels, reference = self.bias, TritonBackend(CPU).plan(layout), TorchBackend()

        class Plan:
            def attend(self, spec: AttentionSpec, kv: Any, *given: Any) -> torch.Tensor:
                exact = [None if x is None else x.float() for x in given]  # rounds nothing between
                copy = kv and LayerKV(kv.keys.float(), kv.values.float(), kv.group)
                due = reference.plan(layout).attend(spec, copy, *exact, bias)
                found = kernels.attend(spec, kv, *given, bias)
                check(found, due.to(found.dtype))
                assert kv is None or equal(kv.keys.float(), copy.keys)
                assert kv is None or equal(kv.values.float(), copy.values)
                return found

        return Plan()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, NaN included."""
    return torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def run_of(
    spec: AttentionSpec,
    lengths: Sequence[int],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
) -> PagedRun:
    """Sequences whose keys and values are in the cache already."""
    sequences = random_sequences(spec, lengths, dtype)
    run = PagedRun(sequences, block_size, backend=BothBackends(bias))
    kv = run.cache.layers[0]
    for blocks, tensors in ((kv.keys, sequences.keys), (kv.values, sequences.values)):
        for table, tensor in zip(run.tables, tensors, strict=True):
            for block, part in zip(table, tensor.split(block_size), strict=True):
                blocks[block, :, : len(part)] = part.transpose(0, 1)
    return run


def decode_all(run: PagedRun) -> None:
    run.step([(i, length - 1, 1) for i, length in enumerate(run.sequences.lengths)])


@pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES)
def test_features(spec: AttentionSpec) -> None:
    """A decode, a chunk of two, one in mid-prompt, and a whole prompt, in one step."""
    run = run_of(spec, [17, 40, 50, 9])
    run.step([(0, 16, 1), (1, 38, 2), (2, 20, 30), (3, 0, 9)])


def test_relative_bias() -> None:
    """In one direction with a prefix; in both without KV, where no distance is the last one."""
    causal = replace(PLAIN, relative=RelativeBias(8, 20, bidirectional=False))
    bias = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    run_of(causal, [40, 50], bias=bias).step([(0, 39, 1), (1, 20, 30)])
    full = replace(PLAIN, kind="full", relative=RelativeBias(8, 20, bidirectional=True))
    whole_texts(random_sequences(full, [1, 40, 7]), bias)


def whole_texts(texts: Sequences, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of an encoder: keys are views of the step's own projections; there is no KV."""
    layout = PagedRun(texts, 16).layout([(i, 0, n) for i, n in enumerate(texts.lengths)])
    parts = map(torch.cat, (texts.queries, texts.keys, texts.values))
    qkv = torch.stack(list(parts), 1)
    return BothBackends(bias).plan(layout).attend(texts.spec, None, *qkv.unbind(1))


def test_whole_texts_see_their_own_alone() -> None:
    texts = random_sequences(replace(PLAIN, kind="full"), [9, 70, 1])
    first = Sequences(texts.spec, texts.queries[:1], texts.keys[:1], texts.values[:1])
    assert torch.equal(whole_texts(texts)[:9], whole_texts(first))


def test_cross() -> None:
    """Decodes and a chunk see all of sources that are longer or shorter than what was answered."""
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
def test_lengths_around_blocks(block_size: int) -> None:
    run = run_of(PLAIN, [1, block_size - 1, block_size, block_size + 1], block_size)
    decode_all(run)
    run.step([(2, 0, block_size), (3, block_size - 1, 2)])


@pytest.mark.parametrize("window", [None, 2, 257, 300])
def test_one_split_and_several(window: int | None) -> None:
    """Windows that begin in the middle of a split, and leave out whole ones."""
    spec = AttentionSpec(3, 1, 8, scale=8**-0.5, window=window)
    run = run_of(spec, [255, 256, 257, 513, 600, 3], 64)
    assert max_splits(640, window) == {None: 3, 2: 2, 257: 2, 300: 3}[window]
    decode_all(run)
    run.step([(4, 250, 14), (3, 511, 2)])


def test_splits_grow_beyond_their_most() -> None:
    """As many keys as fill 32 splits of 256, and one more: then splits have 512 each."""
    spec = AttentionSpec(1, 1, 8, scale=8**-0.5)
    most = SPLIT.value * MAX_SPLITS.value
    run = run_of(spec, [most, most + 1], 128)
    assert max_splits(2 * most, None) == MAX_SPLITS.value
    decode_all(run)


def test_fewer_programs_than_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch leaves each sequence a few programs, which take several splits each."""
    monkeypatch.setattr(decode_attention, "PROGRAMS", 1)
    monkeypatch.setattr(decode_attention, "MIN_SPLIT_PROGRAMS", 2)
    decode_all(run_of(AttentionSpec(2, 1, 8, scale=0.3), [1200, 300], 64))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shapes_and_types(head_dim: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(3, 1, head_dim, scale=head_dim**-0.5)
    run = run_of(spec, [18, 70], 64, dtype)
    run.step([(0, 17, 1), (1, 66, 4)])


def test_a_captured_plan_knows_no_length() -> None:
    """Whole tables and device tensors only: the same bits as planned from the host's lists."""
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
def test_a_captured_plan_of_decodes_and_chunks(window: int | None) -> None:
    """Filled up with a decode of the null block, empty sequences and tokens of none: each token
    has the bits it has in a step planned from the host's lists, and padding is finite."""
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


def test_bits_do_not_depend_on_who_shares_the_step_or_on_chunks() -> None:
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


def test_no_keys_at_all_are_zeros() -> None:
    """So that a row of padding stays finite whatever it is given."""
    out, query = torch.empty(2, 2, 8), torch.ones(2, 2, 8)
    keys = torch.full((1, 2, 16, 8), float("nan"))
    lengths, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    decode_attention.decode_attention(out, query, keys, keys, tables, lengths, Features(1.0))
    assert not out.any()


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """By device, by wish, and with every refusal's reason."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    wide = replace(PLAIN, head_dim=512)
    gpu = torch.device("cuda")
    for device, spec, wanted, due in (
        (CPU, PLAIN, "auto", "torch"),
        (gpu, PLAIN, "auto", "triton"),
        (gpu, PLAIN, "torch", "torch"),
        (gpu, wide, "auto", "torch (not triton: head_dim 512 is beyond 256)"),
    ):
        backend, told = select_backend([PLAIN, spec], torch.float32, device, wanted)
        assert told == due
        assert backend.name == due.split()[0]
    for device, spec, dtype, why in (
        (CPU, PLAIN, torch.float32, "needs a GPU, not cpu"),
        (gpu, wide, torch.float32, "head_dim 512 is beyond 256"),
        (gpu, PLAIN, torch.float64, "not torch.float64"),
    ):
        with pytest.raises(ConfigError, match=rf"{why}.* Use --attention-backend auto"):
            select_backend([spec], dtype, device, "triton")


def test_wide_heads_take_what_a_small_chip_has() -> None:
    """As compiled for sm_86, sm_89 and sm_120: 68 KiB with four stages, 101 with five."""
    small, large, biased = 101376, 166912, Features(1.0, bias=torch.zeros(1, 3))
    assert [stages(256, Features(1.0), chip) for chip in (small, large, None)] == [4, 5, 5]
    assert [stages(128, Features(1.0), chip) for chip in (small, large)] == [5, 5]
    assert stages(64, biased, small) == 2


def test_gpus_that_emulate_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also have too little shared memory for the tiles of bf16: a start would fail later."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
    backend = TritonBackend(torch.device("cuda"))
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **_: native)
        assert backend.refuses(spec, torch.float32) is None
        assert (backend.refuses(spec, torch.bfloat16) is None) == native
