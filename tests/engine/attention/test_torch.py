"""Paged attention in torch matches dense attention, for each feature and many shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import KVCache, block_bytes, write_parts
from engine.attention.select import select_backend
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.attention.torch.backend import TorchBackend
from engine.attention.torch.batching import MAX_PADDING, MAX_SCORES, SPLIT, query_groups
from engine.attention.torch.fused import FusedAttention
from engine.attention.torch.mask import attention_mask
from tests.support.paged import PagedRun, Sequences, dense, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=8**-0.5)
WIDE = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=32, scale=1.0)
MIXED = [PLAIN, PLAIN, PLAIN, WIDE]
# bf16: weights, outputs and scores have 8 bits: the error of a score of 8 is up to 0.03.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (3e-2, 6e-2)}
LENGTHS = (1, 15, 16, 17, 40)


def check(sequences: Sequences, outputs: list[torch.Tensor]) -> None:
    dtype = sequences.queries[0].dtype
    rtol, atol = TOLERANCE[dtype]
    for found, due in zip(outputs, dense(sequences), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), due, rtol=rtol, atol=atol)


# ---- features --------------------------------------------------------------------------------

FEATURES = {
    "causal": PLAIN,
    "full": replace(PLAIN, kind="cross"),
    "window-1": replace(PLAIN, window=1),
    "window-5": replace(PLAIN, window=5),
    "window-16": replace(PLAIN, window=16),
    "softcap": replace(PLAIN, softcap=1.5),
    "softcap-window": replace(PLAIN, softcap=3.0, window=9),
    "scale": replace(PLAIN, scale=1.0),
    "gqa-3": AttentionSpec(6, 2, 8, scale=8**-0.5),
    "sinks": AttentionSpec(6, 2, 8, scale=8**-0.5, window=20, has_sinks=True),
    "mqa-8": AttentionSpec(8, 1, 8, scale=8**-0.5, softcap=2.0, window=20),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES)
def test_torch_attention_each_feature_matches_dense(
    spec: AttentionSpec, dtype: torch.dtype
) -> None:
    sequences = random_sequences(spec, LENGTHS, dtype)
    check(sequences, PagedRun(sequences, 16).whole())
    if spec.kind == "causal":
        for size in (1, 7):
            check(sequences, PagedRun(sequences, 16).chunked(size))


def check_image(sequences: Sequences, backend: AttentionBackend) -> None:
    """Check steps that end before, with and behind an image, and one that begins inside it."""
    shown = replace(sequences, image=(7, 28))
    due = PagedRun(shown, 16, backend=backend).whole()
    check(shown, due)
    assert all((a - b).abs().max() > 0.05 for a, b in zip(due, dense(sequences), strict=True))
    run = PagedRun(shown, 16, backend=backend)
    run.step([(0, 0, 3), (1, 0, 7), (2, 0, 28)])
    run.step([(0, 3, 26), (1, 7, 21), (2, 28, 1)])
    run.step([(0, 29, 11), (2, 29, 1)])
    assert all(map(torch.equal, run.outputs, due))
    run.step([(0, 20, 8), (1, 27, 1)])  # behind a cached prefix
    assert all(map(torch.equal, run.outputs, due))
    # In the same step, other layers may be causal.
    causal = replace(shown, spec=replace(shown.spec, sees_whole_images=False))
    check(causal, PagedRun(causal, 16, backend=backend).whole())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 5, 16])
def test_torch_attention_image_matches_dense(window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(6, 2, 8, scale=8**-0.5, window=window, sees_whole_images=True)
    check_image(random_sequences(spec, [40, 28, 30], dtype), TorchBackend())


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "causal"])
def test_dense_attention_each_feature_changes_output(name: str) -> None:
    """Otherwise the test above could not fail for a feature that is ignored."""
    spec = FEATURES[name]
    sequences = random_sequences(spec, [40])
    (with_it,) = dense(sequences)
    plain = AttentionSpec(spec.num_heads, spec.num_kv_heads, 8, scale=8**-0.5)
    if plain == spec:  # grouped heads: give the query heads other KV heads instead
        keys = [k.flip(1) for k in sequences.keys]
        (without,) = dense(replace(sequences, keys=keys))
    else:
        (without,) = dense(replace(sequences, spec=plain))
    assert (with_it - without).abs().max() > 0.2


@pytest.mark.parametrize("length", [8, 9, 10, 30])
def test_window_includes_query_position(length: int) -> None:
    """With a window of 9, no key is hidden up to length 9. After that, the first keys are."""
    spec = replace(PLAIN, window=9)
    sequences = random_sequences(spec, [length])
    (found,) = PagedRun(sequences, 16).whole()
    (unlimited,) = PagedRun(replace(sequences, spec=PLAIN), 16).whole()
    assert torch.equal(found[:9], unlimited[:9])
    differs = (found != unlimited).flatten(1).any(1)
    assert differs.tolist() == [position >= 9 for position in range(length)]
    last = length - 1
    alone = Sequences(
        PLAIN, [sequences.queries[0][last:]], [sequences.keys[0][-9:]], [sequences.values[0][-9:]]
    )
    full = replace(alone, spec=replace(PLAIN, kind="cross"))
    torch.testing.assert_close(found[last:].double(), dense(full)[0], rtol=1e-5, atol=1e-5)


def test_softcap_is_applied_before_mask() -> None:
    """If it came after the mask, hidden keys would get a weight above 0."""
    sequences = random_sequences(replace(PLAIN, softcap=0.1), [30])
    values = [torch.zeros_like(sequences.values[0])]
    values[0][20:] = 1000.0
    (found,) = PagedRun(replace(sequences, values=values), 16).whole()
    assert not found[:20].any()
    assert found[20:].abs().min() > 1


# ---- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("block_size", [16, 64])
def test_torch_attention_shapes_match_dense(
    heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    spec = AttentionSpec(*heads, head_dim, scale=head_dim**-0.5)
    lengths = [1, block_size - 1, block_size, block_size + 1]
    dtype = torch.bfloat16 if head_dim == 80 else torch.float32
    sequences = random_sequences(spec, lengths, dtype)
    run = PagedRun(sequences, block_size)
    # Prefill all but the last token, then decode the last token of each in one batch.
    run.step([(i, 0, length - 1) for i, length in enumerate(lengths) if length > 1])
    run.step([(i, length - 1, 1) for i, length in enumerate(lengths)])
    check(sequences, run.outputs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_torch_attention_many_key_splits_match_dense(
    window: int | None, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(3, 1, 8, scale=8**-0.5, window=window)
    lengths = [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 9]
    sequences = random_sequences(spec, lengths, dtype)
    check(sequences, PagedRun(sequences, 16).whole())
    run = PagedRun(sequences, 64)
    run.step([(i, 0, n - 1) for i, n in enumerate(lengths)])
    run.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
    check(sequences, run.outputs)


def test_torch_attention_mixed_step_matches_dense() -> None:
    spec = AttentionSpec(6, 2, 16, scale=0.25)
    lengths = [33, 5, 48, 17, 64, 40]
    sequences = random_sequences(spec, lengths)
    run = PagedRun(sequences, 16)
    run.step([(0, 0, 32), (1, 0, 4), (2, 0, 10), (3, 0, 16)])
    run.step([(0, 32, 1), (1, 4, 1), (2, 10, 30), (3, 16, 1), (4, 0, 64)])
    run.step([(2, 40, 8), (5, 0, 1)])
    run.step([(5, 1, 39)])
    check(sequences, run.outputs)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([40, 33, 48], [3]),
        ([16, 200, 17, 190, 5, 30], [2, 4]),
        ([1, 600, 100, 1, 300, 2, 120], [2, 2, 3]),
    ],
)
@pytest.mark.parametrize("window", [None, 40])
def test_query_groups_decodes_of_different_lengths_limit_padding(
    lengths: list[int], groups: list[int], window: int | None
) -> None:
    """No group is padded to more than twice its blocks, and outputs return to their places."""
    spec = AttentionSpec(2, 1, 8, scale=8**-0.5, window=window)
    sequences = random_sequences(spec, lengths)
    run = PagedRun(sequences, 16)
    run.step([(i, 0, n - 1) for i, n in enumerate(lengths) if n > 1])
    layout = run.layout([(i, n - 1, 1) for i, n in enumerate(lengths)])
    found = query_groups(layout, layout.groups[0])
    if window is None:
        assert [group.sequences for group in found] == groups
    for group in found if window is None else ():
        used = (group.tables != 0).sum(1)
        assert int(used.max()) == group.tables.shape[1], "padded beyond the longest sequence"
        if len(groups) > 1:
            assert int(used.min()) * MAX_PADDING >= group.tables.shape[1]
    run.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
    for index, due in enumerate(dense(last_tokens(sequences))):
        torch.testing.assert_close(run.outputs[index][-1:].double(), due, rtol=1e-5, atol=1e-5)


def test_query_groups_chunks_of_different_shapes_limit_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adjacent chunks form a group if padding at most doubles the work. Outputs stay in order."""
    spec = AttentionSpec(2, 1, 8, scale=8**-0.5)
    sequences = random_sequences(spec, [17, 30, 40, 64, 3, 3])
    run = PagedRun(sequences, 16)
    run.step([(0, 0, 16)])
    parts = [(0, 16, 1), *((i, 0, n) for i, n in enumerate(sequences.lengths) if i)]
    layout = run.layout(parts)
    groups = query_groups(layout, layout.groups[0])
    assert [(group.sequences, group.count) for group in groups] == [(1, 1), (3, 64), (2, 3)]
    assert [group.order is None for group in groups] == [True, False, True]
    run.step(parts)
    check(sequences, run.outputs)
    monkeypatch.setattr("engine.attention.torch.batching.MAX_SCORES", 100)
    groups = query_groups(layout, layout.groups[0])
    assert [group.sequences for group in groups] == [1, 1, 1, 1, 2]


FUSED = {
    "causal": AttentionSpec(6, 2, 32, scale=32**-0.5),
    "full": AttentionSpec(2, 2, 32, scale=32**-0.5, kind="cross"),
    "window": AttentionSpec(4, 2, 64, scale=0.125, window=20),
    "long-window": AttentionSpec(4, 2, 64, scale=0.125, window=530),
}


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the CPU has AMX. Without AMX, the fused kernel is correct within tolerance too,
    but slow and not bitwise stable."""
    monkeypatch.setattr("engine.attention.torch.fused.cpu_has_amx", lambda: True)
    monkeypatch.setattr("engine.attention.torch.fused.onednn_has_matmul", lambda *_: True)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("spec", FUSED.values(), ids=FUSED)
def test_fused_attention_matches_dense(spec: AttentionSpec) -> None:
    """Lengths go beyond the number of keys in one split of torch's fused kernel."""
    assert FusedAttention.supports(spec, torch.bfloat16, torch.device("cpu"))
    lengths = [1, 40, 65, 600]
    sequences = random_sequences(spec, lengths, torch.bfloat16)
    check(sequences, PagedRun(sequences, 64).whole())
    if spec.kind == "causal":
        check(sequences, PagedRun(sequences, 16).chunked(50))


@pytest.mark.usefixtures("amx")
def test_fused_attention_relative_bias_equals_matmul_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relative = RelativeBias(num_buckets=8, max_distance=16, bidirectional=False)
    spec = AttentionSpec(4, 2, 32, scale=0.2, relative=relative)
    sequences = random_sequences(spec, [70], torch.bfloat16)
    table = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).mul(3).bfloat16()
    given = sequences.queries[0], sequences.keys[0], sequences.values[0]

    def attended(bias: torch.Tensor) -> torch.Tensor:
        run = PagedRun(sequences, 16)
        plan = run.backend.plan(run.layout([(0, 0, 70)]))
        return plan.attend(spec, run.cache.layers[0], *given, bias).float()

    fused = attended(table)
    assert (fused - attended(torch.zeros_like(table))).abs().max() > 0.2, "the bias has no effect"
    monkeypatch.setattr(FusedAttention, "supports", lambda *_: False)
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(fused, attended(table), rtol=rtol, atol=atol)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.float16),
        ({"softcap": 5.0}, torch.bfloat16),
        ({"head_dim": 16}, torch.bfloat16),
    ],
    ids=str,
)
def test_fused_attention_unsupported_spec_or_dtype_is_refused(
    change: dict[str, Any], dtype: torch.dtype
) -> None:
    spec = replace(FUSED["causal"], **change)
    assert not FusedAttention.supports(spec, dtype, torch.device("cpu"))


@pytest.mark.usefixtures("amx")
def test_fused_attention_without_amx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = FUSED["causal"], torch.bfloat16, torch.device("cpu")
    assert FusedAttention.supports(*arguments)
    monkeypatch.setattr("engine.attention.torch.fused.cpu_has_amx", lambda: False)
    assert not FusedAttention.supports(*arguments)


def last_tokens(sequences: Sequences) -> Sequences:
    """Return the last query of each sequence with its visible keys, for attention without mask."""
    window = sequences.spec.window or 0
    return Sequences(
        replace(sequences.spec, kind="cross", window=None),
        [query[-1:] for query in sequences.queries],
        [keys[-window:] for keys in sequences.keys],
        [values[-window:] for values in sequences.values],
    )


# ---- values in keys --------------------------------------------------------------------------

LATENT = AttentionSpec(4, 1, 40, scale=40**-0.5, value_dim=32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_torch_attention_values_in_keys_match_dense(dtype: torch.dtype) -> None:
    """Over several splits of keys. Chunks, and texts of other lengths, change no bit."""
    sequences = random_sequences(LATENT, [1, 16, 33, SPLIT + 9], dtype)
    found = PagedRun(sequences, 16).whole()
    check(sequences, found)
    for size in (1, 7):
        for chunked, whole in zip(PagedRun(sequences, 16).chunked(size), found, strict=True):
            assert torch.equal(chunked, whole)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_kv_cache_values_in_keys_take_no_bytes(dtype: torch.dtype) -> None:
    """A row of 512 + 64 numbers, and the scale of its codes, for a token and a layer."""
    spec = AttentionSpec(16, 1, 576, scale=1.0, value_dim=512)
    row = 576 + 4 if dtype.itemsize == 1 else 2 * 576
    assert block_bytes([spec] * 3, 16, dtype) == 3 * 16 * row
    cache = KVCache([spec] * 3, 5, 16, dtype, torch.device("cpu"))
    assert cache.num_bytes == 6 * 3 * 16 * row
    cache.layers[1].keys.view(torch.int8).fill_(1)
    write_parts(cache.read_parts(0, [1], [2], [3], transposed_keys=False))
    kept = cache.layers[1].keys.view(torch.int8)[2, 0, :, 0]
    assert kept.tolist() == [1] * 3 + [0] * 13
    cache.scrub([1])
    assert not cache.layers[1].keys.view(torch.int8)[1].any()
    assert all(layer.values is None for layer in cache.layers)


# ---- the cache -------------------------------------------------------------------------------


def test_attend_writes_only_slots_of_its_tokens() -> None:
    spec = AttentionSpec(4, 2, 8, scale=1.0)
    sequences = random_sequences(spec, [20, 35])
    run = PagedRun(sequences, 16)
    before = run.cache.layers[0].keys.clone(), run.cache.layers[0].values.clone()
    parts = [(0, 0, 20), (1, 0, 17)]
    run.step(parts)
    kv = run.cache.layers[0]
    for now, then, source in zip(
        (kv.keys, kv.values), before, (sequences.keys, sequences.values), strict=True
    ):
        expected = then.clone()
        for index, start, count in parts:
            for position in range(start, start + count):
                block, offset = run.tables[index][position // 16], position % 16
                expected[block, :, offset] = source[index][position]
        assert torch.equal(now.nan_to_num(9e9), expected.nan_to_num(9e9))
    run.step([(1, 17, 18)])
    check(sequences, run.outputs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attend_unowned_blocks_and_null_block_do_not_affect_outputs(dtype: torch.dtype) -> None:
    """Unowned blocks hold NaN all the time (see PagedRun). The null block pads and stays zero."""
    sequences = random_sequences(PLAIN, [100, 3, 60, 1], dtype)
    run = PagedRun(sequences, 16)
    outputs = run.chunked(7)
    assert all(output.isfinite().all() for output in outputs)
    kv = run.cache.layers[0]
    assert run.unowned
    for blocks in (kv.keys, kv.values):
        assert not blocks[0].any()
        assert blocks[run.unowned].isnan().all()


@pytest.mark.parametrize("window", [None, 1, 20], ids=lambda window: f"window-{window}")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attend_without_kv_cache_keeps_texts_independent(
    dtype: torch.dtype, window: int | None
) -> None:
    """Texts are padded to the longest of their group. NaN in one must not reach another."""
    spec = AttentionSpec(4, 2, 32, scale=32**-0.5, kind="full", window=window)
    texts = random_sequences(spec, [3, 70, 65, 1, 64, 130], dtype)

    def attended(members: list[int]) -> list[torch.Tensor]:
        own = [[each[i] for i in members] for each in (texts.queries, texts.keys, texts.values)]
        run, lengths = PagedRun(Sequences(spec, *own), 16), [len(query) for query in own[0]]
        plan = run.backend.plan(run.layout([(n, 0, length) for n, length in enumerate(lengths)]))
        return list(plan.attend(spec, None, *map(torch.cat, own)).split(lengths))

    together = attended(list(range(6)))
    check(texts, together)
    for keys, values in ((texts.keys[1], texts.values[1]), (texts.keys[5], texts.values[5])):
        keys[-1], values[-1] = float("nan"), float("nan")
    beside_nan = attended(list(range(6)))
    assert beside_nan[1].isnan().all()
    for i in (0, 2, 3, 4):
        assert torch.equal(together[i], beside_nan[i])
        assert torch.equal(together[i], attended([i])[0])


@pytest.mark.parametrize("window", [None, 9, 600], ids=lambda window: f"window-{window}")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attend_without_kv_cache_long_text_is_computed_in_parts(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores take a bounded memory. Another text of the step changes no bit of it."""
    spec = AttentionSpec(2, 1, 32, scale=32**-0.5, kind="full", window=window)
    texts = random_sequences(spec, [1300, 40], dtype)
    scores: list[int] = []

    def measured(*arguments: Any) -> torch.Tensor:
        mask = attention_mask(*arguments)
        scores.append(mask.numel())
        return mask

    monkeypatch.setattr("engine.attention.torch.matmul.attention_mask", measured)

    def attended(members: list[int]) -> list[torch.Tensor]:
        own = [[each[i] for i in members] for each in (texts.queries, texts.keys, texts.values)]
        lengths = [len(query) for query in own[0]]
        run = PagedRun(Sequences(spec, *own), 16)
        plan = run.backend.plan(run.layout([(n, 0, length) for n, length in enumerate(lengths)]))
        return list(plan.attend(spec, None, *map(torch.cat, own)).split(lengths))

    together = attended([0, 1])
    assert max(scores) <= MAX_SCORES
    check(texts, together)
    assert torch.equal(attended([0])[0], together[0])
    assert torch.equal(attended([1])[0], together[1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attend_without_kv_cache_window_hides_whole_splits(dtype: torch.dtype) -> None:
    """The first and the last splits of keys are hidden from queries in the middle of a text."""
    spec = AttentionSpec(1, 1, 32, scale=32**-0.5, kind="full", window=9)
    texts = random_sequences(spec, [4 * SPLIT + 40], dtype)
    run = PagedRun(texts, 16)
    plan = run.backend.plan(run.layout([(0, 0, texts.lengths[0])]))
    check(texts, [plan.attend(spec, None, texts.queries[0], texts.keys[0], texts.values[0])])


def test_attend_stale_content_of_own_blocks_does_not_affect_outputs() -> None:
    """A reused block has finite values of its previous owner after the last token."""
    sequences = random_sequences(PLAIN, [21, 90])
    fresh, stale = PagedRun(sequences, 16), PagedRun(sequences, 16)
    for blocks in (stale.cache.layers[0].keys, stale.cache.layers[0].values):
        blocks[[block for table in stale.tables for block in table]] = 1e4
    for found, due in zip(stale.chunked(5), fresh.chunked(5), strict=True):
        assert torch.equal(found, due)


def rows_of_blocks(cache: KVCache, layer: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return the rows of a layer's `blocks` that its table's entries name, block after block."""
    return blocks[:: cache.strides[cache.layers[layer].group]]


def test_kv_cache_scrub_zeroes_blocks_and_sizes_match() -> None:
    cache = KVCache(MIXED, 5, 16, torch.bfloat16, torch.device("cpu"))
    assert cache.num_bytes == 6 * block_bytes(MIXED, 16, torch.bfloat16)
    assert block_bytes(MIXED, 16, torch.bfloat16) == 16 * 2 * 2 * 32
    for kv in cache.layers:
        kv.keys.fill_(float("nan"))
        kv.values.fill_(float("nan"))
    cache.scrub([2, 5])
    for layer, kv in enumerate(cache.layers):
        for blocks in (kv.keys, kv.values):
            rows = rows_of_blocks(cache, layer, blocks)
            assert [bool(block.isnan().any()) for block in rows] == [
                True,
                True,
                False,
                True,
                True,
                False,
            ]


def test_kv_cache_narrow_layers_share_the_slot_of_a_wide_one() -> None:
    """Two layers of 16 numbers a token fit where one layer has 32. No two rows overlap."""
    cache = KVCache(MIXED, 5, 16, torch.float32, torch.device("cpu"))
    assert [group.layers for group in cache.groups] == [2, 1, 1]
    assert cache.strides == (2, 2, 1)
    assert [kv.group for kv in cache.layers] == [0, 0, 1, 2]
    number = 0
    expected = []
    for block in range(6):  # each one belongs to one group
        group = block % 3
        for layer, kv in enumerate(cache.layers):
            if kv.group == group:
                for blocks in (kv.keys, kv.values):
                    number += 1
                    rows_of_blocks(cache, layer, blocks)[block].fill_(number)
                    expected.append((rows_of_blocks(cache, layer, blocks)[block], number))
    for row, own in expected:
        assert row.unique().tolist() == [own]


@pytest.mark.parametrize("group", range(3))
@pytest.mark.parametrize("is_transposed", [False, True])
def test_kv_cache_copy_parts_keeps_sources_and_clears_the_rest(
    is_transposed: bool, group: int
) -> None:
    cache = KVCache(MIXED, 5, 16, torch.bfloat16, torch.device("cpu"))

    def by_token(layer: int, blocks: torch.Tensor, *, is_keys: bool) -> torch.Tensor:
        """Return blocks as [blocks, tokens, values]."""
        blocks = rows_of_blocks(cache, layer, blocks)
        if is_keys and is_transposed:
            num, heads, size, dim = blocks.shape
            blocks = blocks.reshape(num, heads, dim, size).transpose(2, 3)
        return blocks.transpose(1, 2).flatten(2)

    tensors = [(n, t) for n, kv in enumerate(cache.layers) for t in (kv.keys, kv.values)]
    for layer, tensor in tensors:
        rows_of_blocks(cache, layer, tensor).copy_(
            torch.randn(rows_of_blocks(cache, layer, tensor).shape)
        )
    for layer, tensor in tensors:
        rows_of_blocks(cache, layer, tensor)[3] = math.nan  # a target's earlier content
    before = [tensor.clone() for _, tensor in tensors]
    # Block 2 is a source and a target: its content of before is copied.
    write_parts(cache.read_parts(group, [1, 2], [2, 3], [8, 5], transposed_keys=is_transposed))
    for index, ((layer, found), old) in enumerate(zip(tensors, before, strict=True)):
        is_keys = index % 2 == 0
        now, was = by_token(layer, found, is_keys=is_keys), by_token(layer, old, is_keys=is_keys)
        if cache.layers[layer].group == group:
            assert torch.equal(now[2, :8], was[1, :8])
            assert torch.equal(now[3, :5], was[2, :5])
            assert not now[2, 8:].any()
            assert not now[3, 5:].any()
        for block in (0, 1, 4, 5):
            assert torch.equal(now[block], was[block])


def test_select_backend_on_cpu_supports_every_feature() -> None:
    cpu = torch.device("cpu")
    backend, told = select_backend(list(FEATURES.values()), torch.float32, cpu)
    assert backend.name == "torch"
    assert told == "torch (not numba: supports no cross layers, and no bias)"
    assert all(backend.refuses(spec, torch.bfloat16) is None for spec in FEATURES.values())
