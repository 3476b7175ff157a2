"""Launches and uploads of a decode step on a GPU, counted on the fake one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from engine.kernels.triton.chips import PLAIN, Features, force
from engine.ops.linear import FEW_ROWS
from tests.support.driver import Driver
from tests.support.fake_cuda import fake_cuda
from tests.support.launch_counter import DOWNLOAD, UPLOAD, counted, kernels
from tests.support.published import PUBLISHED

ALL_ON = Features(
    overlap=True,
    trigger_first=True,
    folded=True,
    early_weights=True,
    split_inputs=True,
    fused_attention=True,
    prefetch_bytes=24 << 20,
    longest_first=True,
    rotates_heads_together=True,
    rank_sums=True,
)
# Kernels of one layer: norm, qkv, rotation and KV store, attention, reduction of its splits, out,
# norm, gate and up, activation, down. Folded, norms and the activation belong to linear layers, and
# attention is one launch.
PER_LAYER = {PLAIN: 10, ALL_ON: 5}
# Inputs, embedding, angles, last norm, head, and two for the draw.
AROUND = 7
LIMIT_AROUND = 8  # for models with a softcap on logits, or two kinds of angles


@pytest.fixture
def features(request: pytest.FixtureRequest) -> Iterator[Features]:
    force(request.param)
    yield request.param
    force(None)


def driver_of(name: str, folder: Path, layers: int, **config: Any) -> Driver:
    folder.mkdir(exist_ok=True)
    model = PUBLISHED[name] | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(model))
    fields: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "speculation": "off"}
    fields["num_gpu_blocks_override"] = 256  # all are checked after each turn
    device = {"device": "cuda", "load_format": "dummy", "dtype": "bfloat16"}
    return Driver(folder, depth=1, **(fields | device | config))


def decode_step(
    name: str, folder: Path, layers: int = 2, *, rows: int = 1, max_num_seqs: int = 4, **params: Any
) -> Counter[str]:
    """Return the launches of one decode step, in the middle of `rows` answers."""
    with fake_cuda() as launches:
        driver = driver_of(name, folder, layers, max_num_seqs=max_num_seqs)
        for _ in range(rows):
            driver.submit([1, 2, 3], 30, **params)
        driver.turn(8)
        with counted(launches):
            driver.turn()
        assert driver.stats.step_decode_tokens == rows
        return Counter(launches)


@pytest.mark.parametrize("features", PER_LAYER, indirect=True, ids=["plain", "all on"])
@pytest.mark.variants(1)
def test_decode_step_launches_kernels_of_each_layer_and_seven_more(
    features: Features, tmp_path: Path
) -> None:
    for layers in (2, 5):
        launches = decode_step("qwen3-0.6b", tmp_path, layers)
        assert kernels(launches) == PER_LAYER[features] * layers + AROUND, launches
        assert launches["aten::copy_"] == 0, "the head writes the logits where they are drawn from"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "Qwen2.5-0.5B", "gemma-2-2b", "gemma-3-1b"])
@pytest.mark.variants(1)
def test_decode_step_of_other_models_launches_at_most_eight_more(name: str, tmp_path: Path) -> None:
    few, many = (kernels(decode_step(name, tmp_path, layers)) for layers in (2, 4))
    around = 2 * few - many
    assert AROUND <= around <= LIMIT_AROUND


def test_decode_step_equal_to_the_last_uploads_nothing(tmp_path: Path) -> None:
    launches = decode_step("qwen3-0.6b", tmp_path, rows=3, temperature=0.7, top_p=0.9)
    assert (launches[UPLOAD], launches[DOWNLOAD]) == (0, 1)


def test_decode_step_of_a_hybrid_model_uploads_nothing(tmp_path: Path) -> None:
    """Rows stay in the slots of their states, which are inputs of the step too."""
    assert decode_step("LFM2-1.2B", tmp_path, rows=3)[UPLOAD] == 0


def test_decode_step_of_many_rows_copies_no_logits(tmp_path: Path) -> None:
    """More rows than our own linear kernel takes: cuBLAS writes the logits in their place."""
    rows = 20
    assert rows > FEW_ROWS
    launches = decode_step("qwen3-0.6b", tmp_path, rows=rows, max_num_seqs=rows)
    assert launches["aten::mm"] > 0
    assert launches["aten::copy_"] == launches[UPLOAD] == 0


def test_decode_step_with_other_rows_uploads_once(tmp_path: Path) -> None:
    """A row that leaves needs one upload; the step after that needs none."""
    with fake_cuda() as launches:
        driver = driver_of("qwen3-0.6b", tmp_path, 2)
        driver.submit([1, 2, 3], 30)
        leaving = driver.submit([1, 2, 3], 30)
        driver.turn(8)
        driver.abort(leaving)
        uploads = []
        for _ in range(3):
            with counted(launches):
                driver.turn()
            uploads.append(launches[UPLOAD])
    assert uploads == [1, 0, 0]


def test_decode_step_with_adjusted_logits_draws_once_more(tmp_path: Path) -> None:
    """The draw of the step is for no row; a second graph draws what the host has adjusted."""
    plain = decode_step("qwen3-0.6b", tmp_path, temperature=1.0)
    adjusted = decode_step("qwen3-0.6b", tmp_path, temperature=1.0, logit_bias=((1, 2.0),))
    assert adjusted["_pick_kernel"] == adjusted["_chunk_kernel"] == 2
    assert adjusted["_inputs_kernel"] == plain["_inputs_kernel"] == 1
    logprobs = decode_step("qwen3-0.6b", tmp_path, temperature=1.0, logprobs=2)
    assert logprobs["_pick_kernel"] == 1, "logprobs need no adjusted logits"
