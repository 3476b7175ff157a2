"""The table of chips: what is on was measured, tiles fit every row count, `plain` turns all off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from engine.attention.backend import GroupLayout, StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.triton import TritonBackend
from engine.kernels.triton import chips
from engine.kernels.triton.chips import (
    CHIPS,
    H200,
    MEASURED,
    PLAIN,
    Chip,
    Features,
    Measurement,
    active,
    features_of,
    force,
)
from engine.kernels.triton.overlap import launch_options
from engine.ops.linear import linear
from tests.engine.runner.test_fake_cuda import engine, generate
from tests.support.fake_cuda import CUDA, fake_cuda

ROOT = Path(__file__).parents[4]
# (inputs, outputs) of Qwen3-0.6B and of Llama-3.1-8B.
WEIGHTS = [
    *((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)),
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
]
ROWS = range(1, 65)
# The rows of a tile follow the rows of a step; nothing else may.
OF_THE_STEP = {"ROWS"}


@pytest.fixture(autouse=True)
def _forced() -> Iterator[None]:
    yield
    force(None)


def unproven(
    table: dict[Chip, Features], measured: dict[Chip, dict[str, Measurement]]
) -> list[tuple[Chip, str]]:
    """Return the optimisations that are on without a committed row of a GPU's benchmark."""
    found = []
    for chip, features in table.items():
        for name in active(features):
            proof = measured.get(chip, {}).get(name)
            if proof is None or not is_committed(proof):
                found.append((chip, name))
    return found


def is_committed(proof: Measurement) -> bool:
    """Return whether the file has the row. A dry run on a CPU has the GPU "none"."""
    path = ROOT / proof.file
    if not path.is_file():
        return False
    said = json.loads(path.read_text(encoding="utf-8"))
    return said.get("gpu", "none") != "none" and proof.row in {row["what"] for row in said["rows"]}


def test_every_optimisation_that_is_on_cites_a_committed_row() -> None:
    assert unproven(CHIPS, MEASURED) == []
    cited = {(chip, name) for chip, proofs in MEASURED.items() for name in proofs}
    on = {(chip, name) for chip, features in CHIPS.items() for name in active(features)}
    assert cited == on, "a citation of what is off is out of date"


@pytest.mark.parametrize(
    "proof",
    [
        None,
        Measurement("docs/benchmarks/gpu-h200.json", "qwen3-0.6b, decode, batch 3"),
        Measurement("docs/benchmarks/gpu-h300.json", "qwen3-0.6b, decode, batch 1"),
        Measurement("docs/benchmarks/cpu-125m.json", "qwen3-0.6b, decode, batch 1"),
    ],
    ids=["no citation", "no such row", "no such file", "of a CPU"],
)
def test_optimisation_without_its_row_is_found(proof: Measurement | None) -> None:
    cited = {} if proof is None else {H200: {"overlap": proof}}
    assert unproven({H200: Features(overlap=True)}, cited) == [(H200, "overlap")]


def test_active_features_are_those_that_differ_from_plain() -> None:
    assert active(PLAIN) == ()
    assert active(Features(overlap=True)) == ("overlap",)


def test_chip_without_a_line_gets_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features_of(torch.device("cpu")) == PLAIN
    for other in (H200._replace(num_sms=114), Chip((8, 0), 108, 40 << 20)):
        monkeypatch.setattr(chips, "chip_of", lambda device, other=other: other)
        assert features_of(CUDA) == PLAIN
        assert launch_options(CUDA) == {"OVERLAP": False}
    monkeypatch.setattr(chips, "chip_of", lambda device: H200)
    assert features_of(CUDA) == CHIPS[H200]


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Record the name and the options of each launch instead of running it."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        chosen = {name: value for name, value in options.items() if name not in OF_THE_STEP}
        found.append((self.__name__, chosen))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


@pytest.mark.parametrize("features", {PLAIN, *CHIPS.values()}, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), WEIGHTS)
def test_tile_of_a_linear_does_not_depend_on_the_rows(
    monkeypatch: pytest.MonkeyPatch, features: Features, inputs: int, outputs: int
) -> None:
    """The sum of a row has one order wherever our kernel computes it, at 1 to 64 rows."""
    force(features)
    found = launched(monkeypatch)
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    for rows in ROWS:
        linear(weight.new_empty(rows, inputs), weight, kernels="triton")
    assert len(found) >= 16, "few rows are computed by our kernel"
    for name in {name for name, _ in found}:
        same = [options for other, options in found if other == name]
        assert same == same[:1] * len(same)


@pytest.mark.parametrize("features", {PLAIN, *CHIPS.values()}, ids=str)
def test_tile_of_decode_attention_does_not_depend_on_the_sequences(
    monkeypatch: pytest.MonkeyPatch, features: Features
) -> None:
    force(features)
    found = launched(monkeypatch)
    spec = AttentionSpec(16, 8, 128, scale=128**-0.5)
    cache = torch.empty(2, 100, 8, 64, 128, dtype=torch.bfloat16, device="meta")
    for rows in ROWS:
        places = torch.empty(rows, dtype=torch.int64, device="meta")
        group = GroupLayout(places.new_empty(rows, 33), places)
        starts = places.new_empty(rows + 1)
        layout = StepLayout(rows, None, None, places.int(), starts, [group], places, places, 64)
        plan = TritonBackend(cache.device).plan(layout)
        kv = LayerKV(cache[0], cache[1], 0)
        plan.attend(spec, kv, cache.new_empty(rows, 16, 128), None, None)
    assert found
    for name in {name for name, _ in found}:
        same = [options for other, options in found if other == name]
        assert same == same[:1] * len(same)


def test_tile_that_depends_on_the_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees a launcher that takes another tile from 9 rows on."""
    from engine.kernels.triton.linear import TILE, few_rows_linear

    found = launched(monkeypatch)
    weight = torch.empty(64, 512, dtype=torch.bfloat16, device="meta")
    for rows in (8, 9):
        tile = TILE if rows < 9 else TILE._replace(inputs=128)
        few_rows_linear(weight.new_empty(rows, 512), weight, None, weight.dtype, tile)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("kernels", "features"), [("auto", active(CHIPS[H200])), ("plain", ())], ids=["auto", "plain"]
)
def test_engine_reports_and_uses_the_features_that_are_on(
    kernels: str, features: tuple[str, ...], tmp_path: Path
) -> None:
    with fake_cuda():
        driver = engine("qwen3-0.6b", tmp_path, kernels=kernels)
        generate(driver)
        assert active(features_of(CUDA)) == features
    assert driver.core.facts.kernel_features == features
