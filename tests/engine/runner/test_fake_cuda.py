"""On a GPU, no step mixes devices, reads a tensor on the host, or has invalid kernel launches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from engine.errors import ConfigError
from engine.kernels.triton import chips
from engine.kernels.triton.chips import Features, force
from engine.kernels.triton.softcap import cap_softly
from engine.memory.graph_shapes import GraphShape
from engine.runner.draft_model import DraftModel
from tests.support.driver import Driver
from tests.support.fake_cuda import CUDA, fake_cuda
from tests.support.published import PUBLISHED

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "seed": 3},
    {"logprobs": 3},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((1, 2.0),), "min_tokens": 2, "stop_token_ids": (3,)},
    {"temperature": 1.0, "banned_sequences": ((1,), (2, 3), (4, 5))},
]
# A decoder with all attention features, an encoder, and an encoder-decoder.
QUICK = ["gemma-2-2b", "all-MiniLM-L6", "opus-mt"]
OTHERS = [name for name in PUBLISHED if name not in QUICK]


def engine(name: str, folder: Path, **config: Any) -> Driver:
    model = {"decoder_start_token_id": 0} | PUBLISHED[name]
    if model.get("num_hidden_layers", 0) > 6:  # further layers test the same code
        model["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(model))
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    fields = small | {"device": "cuda", "load_format": "dummy", "dtype": "bfloat16"} | config
    return Driver(folder, depth=1, **fields)


def generate(driver: Driver) -> None:
    """Run prefill, decode and mixed steps, with rows that use each way of sampling."""
    source = [5, 6, 7] if driver.runner.kind == "encoder-decoder" else None
    ids = [
        driver.submit([1, 2, 3] * (1 + 6 * (n == 1)), 3, source=source, **params)
        for n, params in enumerate(PARAMS)
    ]
    driver.run()
    assert [driver.finish(i) for i in ids] == ["length"] * len(ids)


def check(name: str, folder: Path, **config: Any) -> None:
    with fake_cuda() as launches:
        driver = engine(name, folder, **config)
        kinds = {"extend_kernel", "_norm_kernel"}
        if driver.runner.kind == "encoder":
            ids = [driver.embed([1, 2, 3]), driver.embed([4] * 9)]
            driver.run()
            assert all(driver.vector(i).numel() for i in ids)
        else:
            generate(driver)
            while driver.runner.capture_when_idle():
                pass
            generate(driver)  # now every step is replayed
            kinds |= {"decode_kernel", "_inputs_kernel", "_chunk_kernel", "_pick_kernel"}
    assert launches.keys() >= kinds


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.variants(1)
def test_engine_on_fake_cuda_keeps_tensors_on_one_device(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


ATTENTION = ("_rotate_kernel", "decode_kernel", "reduce_kernel", "fused_decode_kernel")


@pytest.mark.parametrize("is_fused", [False, True])
def test_attention_of_decode_step_on_fake_cuda_has_one_launch_a_layer_if_fused(
    is_fused: bool, tmp_path: Path
) -> None:
    """Head norms, rotation, KV store, splits and their reduction of Qwen3, in a captured step."""
    with fake_cuda() as launches:
        force(Features(fused_attention=is_fused, prefetch_bytes=8 << 20))
        try:
            driver = engine("qwen3-0.6b", tmp_path)
            while driver.runner.capture_when_idle():
                pass
            request = driver.submit([1, 2, 3], 3)
            driver.turn(2)
            launches.clear()
            driver.turn(1)
            found = {name: launches[name] for name in ATTENTION if launches[name]}
            driver.run()
        finally:
            force(None)
    layers = 2
    today = dict.fromkeys(ATTENTION[:3], layers)
    assert found == ({"fused_decode_kernel": layers} if is_fused else today)
    assert driver.finish(request) == "length"


@pytest.mark.slow
def test_engine_on_fake_cuda_runs_in_fp32(tmp_path: Path) -> None:
    check(QUICK[0], tmp_path, dtype="float32")


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b"])
def test_decode_step_with_everything_folded_has_four_launches_besides_attention(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A step that is replayed; outside the layers are the last norm and the head."""
    request.addfinalizer(lambda: chips.force(None))
    chips.force(
        Features(
            overlap=True, trigger_first=True, folded=True, early_weights=True, split_inputs=True
        )
    )
    with fake_cuda() as launches:
        driver = engine(name, tmp_path)
        graphs = driver.runner.graphs
        assert graphs is not None
        launches.clear()
        graphs._steps[GraphShape(4)]()
    model: Any = driver.loaded.plan.model
    layers = len(model.blocks)
    assert launches["folded_linear_kernel"] == 4 * layers + 1
    assert launches["_norm_kernel"] == 1
    assert launches["_gather_kernel"] == 1
    assert not {"_linear_kernel", "_activation_kernel"} & launches.keys()


@pytest.mark.variants(1)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_engine_on_fake_cuda_keeps_quantized_weights(quantization: str, tmp_path: Path) -> None:
    """Weights are rounded on the device, and their bytes are those that were planned."""
    with fake_cuda() as launches:
        driver = engine("qwen3-0.6b", tmp_path, quantization=quantization)
        generate(driver)
        while driver.runner.capture_when_idle():
            pass
        generate(driver)
    facts = driver.core.facts
    assert facts.quantization == quantization
    assert launches["_codes_kernel"] > 0
    assert launches["_linear_kernel"] == 0, "every weight has codes"
    entries = {entry.name: entry for entry in facts.memory}
    weights = entries["weights"], entries[f"{quantization} weights"]
    assert [entry.planned for entry in weights] == [entry.measured for entry in weights]
    assert facts.weight_bytes == sum(entry.planned for entry in weights)
    plan = driver.loaded.plan
    config: Any = plan.model.config
    head = 2 * config.vocab_size * config.hidden  # the largest layer, in bf16
    assert plan.loading_bytes == facts.weight_bytes + head


@pytest.mark.slow
@pytest.mark.variants(3)
@pytest.mark.parametrize("name", QUICK)
def test_engine_on_fake_cuda_quantizes_every_kind_of_model(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, quantization="int4")


def test_plan_on_cuda_refuses_quantization_without_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.kernels.find_spec", lambda name: None)
    with fake_cuda(), pytest.raises(ConfigError, match="--quantization needs the package triton"):
        engine("qwen3-0.6b", tmp_path, quantization="fp8")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_plan_on_cuda_refuses_batch_invariance(quantization: str | None, tmp_path: Path) -> None:
    """Few rows and many have other tiles, with quantised weights too."""
    with fake_cuda(), pytest.raises(ConfigError, match="--batch-invariant on is not possible"):
        engine("qwen3-0.6b", tmp_path, quantization=quantization, batch_invariant="on")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_engine_on_fake_cuda_other_models_keep_tensors_on_one_device(
    name: str, tmp_path: Path
) -> None:
    check(name, tmp_path)


def test_fake_tensor_ellipsis_index_matches_torch() -> None:
    with fake_cuda():
        there = torch.ones(2, 3, 4, 5, device=CUDA)
        assert there[..., :2].shape == (2, 3, 4, 2)
        assert there[0, ..., None, 1:].shape == (3, 4, 1, 4)
        assert there[...].shape == there.shape


@pytest.mark.parametrize(
    "mistake",
    [
        lambda there: there + torch.ones(3, 3),
        lambda there: there.index_select(0, torch.tensor([1])),
        lambda there: there.max().item(),
        lambda there: there[there > 0],
        lambda there: cap_softly(torch.ones(3), 1.0, there[0]),
    ],
    ids=["mixed", "index", "item", "mask", "kernel"],
)
def test_fake_cuda_invalid_op_raises(mistake: Callable[[torch.Tensor], object]) -> None:
    with fake_cuda(), pytest.raises((RuntimeError, AssertionError)):
        mistake(torch.ones(3, 3, device=CUDA))


def test_engine_on_cuda_sums_in_fp32(tmp_path: Path) -> None:
    """By default cuBLAS may add the parts of a 16-bit product in 16 bits."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    try:
        for name in names:
            setattr(matmul, name, True)
        with fake_cuda():
            engine(QUICK[0], tmp_path)
        assert [getattr(matmul, name) for name in names] == [False, False]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def test_draft_model_on_fake_cuda_is_replayed(tmp_path: Path) -> None:
    """It drafts on the device of the served model, and its decodes are captured."""
    with fake_cuda() as launches:
        driver = engine(QUICK[0], tmp_path, speculative_model=str(tmp_path))
        generate(driver)
        draft = driver.loaded.drafter
        assert isinstance(draft, DraftModel)
        graphs = draft._runner.graphs
        assert graphs is not None
        assert graphs.sizes == [1, 2, 4, 8]
        assert draft.num_computed
    assert launches.keys() >= {"extend_kernel", "decode_kernel", "_pick_kernel"}


def test_adapters_on_fake_cuda_have_graphs_of_their_own(tmp_path: Path) -> None:
    """Chunks and decodes with an adapter launch its kernels; those without launch none."""
    with fake_cuda() as launches:
        driver = engine(QUICK[0], tmp_path, max_loras=2, max_lora_rank=8)
        assert driver.runner.graphs is not None
        shapes = {shape for shape in driver.runner.graphs._steps if shape.has_adapters}
        assert {shape.decodes for shape in shapes} == {1, 2, 4, 8}
        # Files cannot be read into fake tensors: slot 2 counts as loaded.
        driver.adapters._known[7] = mock.Mock()
        driver.core.scheduler.adapters.place(7, 2)
        launches.clear()
        driver.submit([1, 2, 3], 3)
        driver.run()
        assert not launches["_shrink_kernel"]
        request_id = driver.submit([1, 2, 3], 3, adapter=7)
        driver.run()
        assert driver.finish(request_id) == "length"
    assert launches["_shrink_kernel"] == launches["_expand_kernel"] > 0
