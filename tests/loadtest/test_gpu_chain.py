"""The variants of the kernels, what their measurements launch, and what the stop rules say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from triton.runtime.interpreter import InterpretedFunction

from engine.kernels.triton.chips import H200, PLAIN, Features
from engine.kernels.triton.linear import TILE
from loadtest.gpu.bench import Bench, Row
from loadtest.gpu.chain import chain
from loadtest.gpu.device import LAYERS, paged_attention
from loadtest.gpu.models import Chip
from loadtest.gpu.report import chip_lines, chosen, stop_rules
from loadtest.gpu.sweeps import every_weight, linear_with, num_weights, sweep_linear
from loadtest.gpu.trace import interpreted_launches
from loadtest.gpu.variants import (
    APART,
    PROMPT_STEPS,
    PROMPT_VARIANTS,
    STEPS,
    VARIANTS,
    Variant,
    forced,
    missing,
    variants,
)
from tests.engine.runner.test_fake_cuda import engine, generate
from tests.support.fake_cuda import fake_cuda
from tests.support.interpreter import mend


def named_variants(steps: Any) -> list[Variant]:
    """Return all steps as variants, also those whose field does not exist yet."""
    return [Variant(name, field, PLAIN) for name, field, _ in steps]


RATES = Chip(read=4.3e12, matmul=790e12)


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    mend()
    with forced(PLAIN):
        yield


def bench(folder: Path) -> Bench:
    return Bench(RATES, smoke=True, folder=folder)


def test_every_feature_is_measured_by_a_variant() -> None:
    named = {field for _, field, _ in [*STEPS, *PROMPT_STEPS]}
    assert set(Features._fields) <= named | APART.keys()


def test_variant_without_a_field_is_left_out_and_named() -> None:
    steps = [("V0", "overlap", True), ("V1", "flies", True)]
    assert [v.name for v in variants(steps)] == ["V0"]
    fields = {step.split()[1] for step in missing()}
    assert fields.isdisjoint(Features._fields)
    assert fields.isdisjoint(variant.adds for variant in [*VARIANTS, *PROMPT_VARIANTS])


def launched(folder: Path, features: Features) -> set[Any]:
    """Return the kernels of a few steps with their options, on a GPU that runs none of them."""
    found = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add((self.fn.__name__, tuple(sorted(map(str, options.items())))))

    with (
        fake_cuda(),
        mock.patch.object(InterpretedFunction, "run", run),
        forced(features),
    ):
        generate(engine("qwen3-0.6b", folder))
    return found


@pytest.mark.slow
def test_each_variant_launches_other_kernels_than_the_one_before(tmp_path: Path) -> None:
    """A variant that is silently equal to the one before would be measured twice."""
    chains = [[PLAIN, *(v.features for v in VARIANTS)]]
    chains += [[VARIANTS[0].features, *(v.features for v in PROMPT_VARIANTS)]]
    for features in chains:
        seen = [launched(tmp_path, each) for each in features]
        assert [one != other for one, other in pairwise(seen)] == [True] * (len(seen) - 1)


def test_first_variant_launches_other_kernels_than_plain_ones(tmp_path: Path) -> None:
    assert launched(tmp_path, PLAIN) != launched(tmp_path, VARIANTS[0].features)


def test_attention_alone_launches_only_the_kernels_of_attention(tmp_path: Path) -> None:
    with torch.inference_mode():
        run, _ = paged_attention(bench(tmp_path), 2, 300)  # two splits, which are reduced
    with interpreted_launches() as found:
        run()
    assert [event.name for event in found] == ["decode_kernel", "reduce_kernel"] * LAYERS


@pytest.mark.parametrize("size", [2 << 20, 50 << 20, 1 << 30], ids=["2 MB", "50 MB", "1 GB"])
def test_replay_of_a_sweep_launches_at_least_eight_kernels(size: int) -> None:
    """The 8B's head has 1 GB; one kernel a replay would show the start of the graph."""
    weight = torch.zeros(16, 16, dtype=torch.bfloat16)
    weights = [weight] * num_weights(size)
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    run = every_weight(partial(linear_with, TILE), x, weights[:9])
    with interpreted_launches() as found:
        run()
    assert len(weights) >= 8
    assert len(found) == min(len(weights), 9)


def test_sweep_covers_1_16_32_and_64_rows_of_each_weight(tmp_path: Path) -> None:
    def linear(self: Any, *args: Any, **options: Any) -> None:
        pass  # the sweep's rows do not depend on the results

    with mock.patch.object(InterpretedFunction, "run", linear):
        rows = sweep_linear(bench(tmp_path))
    names = [row.what for row in rows]
    assert [f"linear, {count} rows, 64 to 48" in names for count in (1, 16, 32, 64)] == [True] * 4
    assert "tile of a weight (48, 64)" in names


def test_chain_has_a_row_for_each_variant_with_its_launches(tmp_path: Path) -> None:
    measured = list(dict.fromkeys((VARIANTS[0], VARIANTS[-1])))
    with mock.patch("loadtest.gpu.chain.VARIANTS", measured):
        rows = chain(bench(tmp_path))
    assert [row.what.split(", ")[-1] for row in rows] == [f"{v.name} {v.adds}" for v in measured]
    first = rows[0].figures
    # Nine kernels a layer, as one split needs no reduction; the embedding and the norm at the end.
    assert first["launches"] == (2 * 9 + 2) / 2
    assert first["attention_us"] > 0
    assert first["out_us"] > 0


def chain_row(field: str, value: float, **figures: float) -> Row:
    name = {field: name for name, field, _ in STEPS}[field]
    figures = {"launches": 10.0, "out_us": 5.0, "attention_us": 8.0} | figures
    return Row(f"chain, qwen3-0.6b, 1 rows, {name} {field}", value, "us/layer", figures=figures)


CHAIN = [
    chain_row("overlap", 34.0),
    chain_row("trigger_first", 33.5),
    chain_row("folded", 30.5),
    chain_row("early_weights", 26.0),
    chain_row("split_inputs", 26.1),
    chain_row("fused_attention", 21.0),
    chain_row("prefetch_bytes", 19.0, out_us=4.8),
]


def test_stop_rules_judge_trigger_folding_and_prefetch() -> None:
    assert stop_rules(CHAIN) == [
        "qwen3-0.6b, 1 rows: trigger_first: keep it for the order, expect nothing: 0.05 us a "
        "launch",
        "qwen3-0.6b, 1 rows: folded: 3.0 us a layer: ramps dominate; early weights and prefetch "
        "first",
        "qwen3-0.6b, 1 rows: prefetch_bytes: off: out is 0.20 us faster, attention 0.0 % slower",
    ]
    better = [*CHAIN[:-1], chain_row("prefetch_bytes", 19.0, out_us=4.4, attention_us=8.3)]
    assert "prefetch_bytes: on" in stop_rules(better)[-1]
    worse = [*CHAIN[:-1], chain_row("prefetch_bytes", 19.0, out_us=4.4, attention_us=8.5)]
    assert "prefetch_bytes: off" in stop_rules(worse)[-1]


def sweep_row(shape: str, ours: float, cublas: float) -> Row:
    figures = {"best_us": ours, "tile_us": ours, "cublas_us": cublas}
    return Row(f"linear, 32 rows, {shape}", 1.0, "% of read", figures=figures)


def test_stop_rule_of_linears_leaves_cublas_its_shapes_if_two_are_slower() -> None:
    shapes = ["4096 to 6144", "4096 to 4096", "4096 to 28672", "14336 to 4096"]
    rows = [sweep_row(shape, 2.0, 1.0 if n < 2 else 3.0) for n, shape in enumerate(shapes)]
    said = "llama-3.1-8b, linear, 32 rows: cuBLAS keeps 4096 to 6144; 4096 to 4096"
    assert stop_rules(rows) == [said]
    assert stop_rules(rows[1:]) == [
        f"llama-3.1-8b, linear, 32 rows: ours for {', '.join(shapes[1:])}"
    ]
    not_ours = Row("linear, 32 rows, 4096 to 6144", 1.0, "%", figures={"best_us": 0.0})
    assert stop_rules([not_ours]) == []


def test_lines_for_the_table_of_chips_cite_the_rows_of_what_gains(tmp_path: Path) -> None:
    path = tmp_path / "gpu-h200-2.json"
    with mock.patch("loadtest.gpu.report.variants", named_variants):
        on = chosen(CHAIN)
        lines = chip_lines(CHAIN, H200, path)
    assert list(on) == ["overlap", "trigger_first", "folded", "early_weights", "fused_attention"]
    assert f"Commit {path} as docs/benchmarks/gpu-h200-2.json" in lines[0]
    assert lines[1].endswith("fused_attention=True),")
    cited = "\n".join(lines)
    assert '"chain, qwen3-0.6b, 1 rows, V2 folded"' in cited
    assert '"split_inputs"' not in cited, "it gains nothing"
    assert '"prefetch_bytes"' not in cited, "its stop rule says off"


def test_dry_run_and_run_without_json_give_no_lines_for_the_table() -> None:
    assert chip_lines(CHAIN, None, Path("x.json")) == [
        "No lines for chips.py: this was a dry run without a GPU."
    ]
    assert chip_lines(CHAIN, H200, None)[0].startswith("No lines for chips.py: without --json")
    assert chip_lines([], H200, Path("x.json")) == []
