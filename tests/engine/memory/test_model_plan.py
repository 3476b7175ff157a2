"""The memory that `serve --plan` predicts is the memory that a start takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.device.openmp_wait import OpenMPWait
from engine.errors import ConfigError
from engine.memory.model_plan import ATTENTION_SLOWNESS, ModelPlan
from engine.memory.profile import largest_step
from engine.memory.report import (
    KV_CACHE,
    LARGEST_STEP,
    PACKED_WEIGHTS,
    PROCESSES,
    ROWS,
    WEIGHTS,
    plan_memory,
)
from engine.runner.load import measure_steps
from tests.support.driver import Driver, tiny_llama
from tests.support.tape import TapeRecorder
from tests.support.tiny_bert import tiny_bert


def peak_bytes(run: Any) -> int:
    """Return the peak size in bytes of the tensors that `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


SUMS = ("at start", "in all", "free now", "left")
CONFIG: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 12}


@pytest.mark.parametrize(
    ("prepack", "tied"), [(False, False), (True, False), (True, True)], ids=str
)
def test_plan_weights_kv_and_rows_match_start_to_the_byte(
    checkpoint: Path, tmp_path: Path, prepack: bool, tied: bool
) -> None:
    config = CONFIG | {"num_gpu_blocks_override": 40, "prepack": prepack}
    folder = tiny_llama(tmp_path, tie_word_embeddings=tied) if tied else checkpoint
    plan = plan_memory(ModelPlan(EngineConfig(model=str(folder), **config)))
    loaded = Driver(folder, load_format="dummy", **config).loaded
    runner, facts = loaded.runner, loaded.facts
    found = {e.name: e.measured for e in facts.memory if e.measured is not None}
    assert found.keys() >= {WEIGHTS, ROWS, KV_CACHE}
    assert (PACKED_WEIGHTS in found) == prepack
    for entry in facts.memory:
        assert entry.planned == plan.planned[entry.name]
        assert entry.measured in (None, entry.planned), entry.name
    tables = sum(buffer.nbytes for buffer in loaded.plan.module.buffers())
    loaded = sum(size for what, size in found.items() if "weights" in what)
    assert loaded >= facts.weight_bytes + tables, "a packed tied head must keep its table"
    assert (loaded > facts.weight_bytes + tables) == (tied and prepack)
    assert found[KV_CACHE] == runner.kv.num_bytes
    assert (plan.num_blocks, plan.max_model_len) == (40, facts.max_model_len)


def test_plan_without_onednn_bf16_does_not_pack_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without AVX-512, oneDNN cannot pack bf16 weights. Plan and start must handle it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    config = CONFIG | {"num_gpu_blocks_override": 40, "dtype": "bfloat16"}
    driver = Driver(checkpoint, **config)
    facts = driver.loaded.facts
    assert facts.emulates_bf16
    plan = plan_memory(ModelPlan(EngineConfig(model=str(checkpoint), **config)))
    assert PACKED_WEIGHTS not in plan.planned
    assert [e.measured for e in facts.memory if e.name == WEIGHTS] == [plan.planned[WEIGHTS]]
    request = driver.submit([5, 6, 7], max_tokens=4)
    driver.run()
    assert len(driver.tokens(request)) == 4


@pytest.mark.parametrize("build", [tiny_llama, tiny_bert], ids=["decoder", "encoder"])
@pytest.mark.variants(1)
def test_measure_runs_largest_step_and_reserves_its_peak_and_graphs(
    build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate the measurement of a GPU's start with invented sizes.

    A step takes 1000 bytes, one with prompt logprobs 2000, captured ones 3000 and 4000. The
    graph buffers, each of eight decode sizes and each of six mixed shapes keep 500 bytes.
    """
    computed: list[Any] = []

    def peak_of(compute: Callable[[], Any]) -> int:
        computed.append(compute())
        return 1000 * len(computed)

    def kept_by(compute: Callable[[], Any]) -> int:
        compute()
        return 500

    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 64}
    loaded = Driver(build(tmp_path), captured=True, enforce_eager=True, **sizes).loaded
    plan = loaded.plan
    monkeypatch.setattr("engine.memory.profile.peak_of", peak_of)
    monkeypatch.setattr("engine.memory.profile.kept_by", kept_by)
    monkeypatch.setattr("engine.runner.load.CudaRecorder", TapeRecorder)
    records = plan.kind != "encoder"
    monkeypatch.setattr(ModelPlan, "captures_graphs", records)
    profile = measure_steps(plan, OpenMPWait(dict, None))
    assert (profile.step_bytes, profile.graph_bytes) == ((4000, 500 * 15) if records else (1000, 0))
    step = largest_step(plan)
    assert sum(s.count for s in step.slices) == (64 if records else 0)
    assert all(s.start + s.count == plan.max_model_len for s in step.slices)
    assert len(computed[0].wait()) == (6 if records else 0)
    if records:
        [logprobs] = computed[1].prompt_logprobs()
        assert [len(entry.top) for entry in logprobs] == [20] * 64


def test_start_on_too_small_gpu_raises_config_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to change; otherwise the engine would end with OutOfMemoryError."""

    def no_memory(compute: Callable[[], Any]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    loaded = Driver(checkpoint).loaded
    monkeypatch.setattr("engine.memory.profile.peak_of", no_memory)
    with pytest.raises(ConfigError, match=r"largest step does not fit .* --max-num-batched-tokens"):
        measure_steps(loaded.plan, OpenMPWait(dict, None))
    monkeypatch.setattr("engine.memory.model_plan.available_memory", lambda device: 1 << 10)
    monkeypatch.setattr("engine.memory.model_plan.total_memory", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match="of the GPU's"):
        Driver(checkpoint)


def test_weights_larger_than_machine_raise_config_error_before_loading(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the system would kill the engine while it loads them."""
    monkeypatch.setattr("engine.memory.model_plan.machine_memory", lambda: 1 << 10)
    config = EngineConfig(model=str(checkpoint), **CONFIG)
    with pytest.raises(ConfigError, match="but the machine has"):
        plan_memory(ModelPlan(config))
    with pytest.raises(ConfigError, match="but the machine has"):
        Driver(checkpoint)


@pytest.mark.parametrize(
    ("shape", "prompts", "params"),
    [
        ({"intermediate_size": 4096}, [192], {}),
        ({"vocab_size": 100_000}, [4] * 48, {"temperature": 1.0, "top_p": 0.9}),
        ({"max_position_embeddings": 2048}, [2000], {}),
    ],
    ids=["layers", "logits", "attention"],
)
def test_plan_step_bytes_are_close_to_measured_peak(
    tmp_path: Path, shape: dict[str, int], prompts: list[int], params: dict[str, float]
) -> None:
    folder = tiny_llama(tmp_path, **shape)
    driver = Driver(folder, max_num_batched_tokens=192, max_num_seqs=len(prompts))
    for number, length in enumerate(prompts):
        driver.submit([1 + number, *[5] * (length - 1)], 2, **params)
    taken = max(peak_bytes(driver.turn) for _ in range(-(-max(prompts) // 192)))
    predicted = driver.loaded.plan.step_bytes
    assert predicted / 2 < taken < predicted * 1.5


@pytest.mark.parametrize("lengths", [[2000], [48] * 50], ids=["one long text", "many"])
def test_plan_encoder_step_bytes_are_close_to_measured_peak(
    tmp_path: Path, lengths: list[int]
) -> None:
    longest = max(lengths)
    folder = tiny_bert(tmp_path, max_position_embeddings=longest, num_hidden_layers=1)
    driver = Driver(folder, max_num_encoder_tokens=sum(lengths))
    for length in lengths:
        driver.embed([5] * length)
    taken = peak_bytes(driver.turn)
    predicted = driver.loaded.plan.step_bytes
    assert predicted / 2 < taken < predicted * 1.5


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "serve", *arguments, "--plan", "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_plan_command_prints_memory_without_reading_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    done = plan(str(tmp_path), "--kv-cache-memory-bytes", "1MiB")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    for line in (PROCESSES, WEIGHTS, KV_CACHE, ROWS, LARGEST_STEP, *SUMS):
        assert any(row.rstrip().endswith(line) for row in done.stdout.splitlines()), line


@pytest.mark.slow
def test_plan_command_larger_than_memory_exits_with_status_2(checkpoint: Path) -> None:
    done = plan(str(checkpoint), "--num-gpu-blocks-override", "1", "--max-model-len", "256")
    assert done.returncode == 2
    assert "--num-gpu-blocks-override 4" in done.stderr
    for flag, size in (("--kv-cache-memory-bytes", "100TiB"), ("--num-gpu-blocks-override", 10**9)):
        done = plan(str(checkpoint), flag, str(size))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{flag} requests" in done.stderr


def test_plan_context_costs_prompts_of_a_cpu_and_not_of_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ModelPlan(EngineConfig(model=str(checkpoint), **CONFIG))
    # A layer multiplies each query with a key and a value for each token of context.
    attended = sum(2 * each.num_heads * each.head_dim for each in plan.attention_specs)
    cost = ATTENTION_SLOWNESS * attended / plan.num_parameters
    assert plan.context_cost == pytest.approx(cost)
    monkeypatch.setattr(plan, "device", torch.device("cuda"))
    assert plan.context_cost == 0


@pytest.mark.parametrize(
    ("config", "variance", "why"),
    [
        ({"prepack": False}, "unpacked", "use --prepack"),
        ({"threads": 2}, "onednn", "torch 2.11 or newer"),
    ],
)
def test_plan_refuses_batch_invariance_that_cannot_be_had(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    variance: str,
    why: str,
) -> None:
    if variance == "onednn":
        monkeypatch.setattr("engine.device.facts._onednn_version", lambda: (3, 7, 1))
    wanted = EngineConfig(model=str(checkpoint), **({"dtype": "float32", "device": "cpu"} | config))
    for choice in ("auto", "off"):
        assert (
            ModelPlan(msgspec.structs.replace(wanted, batch_invariant=choice)).batch_variance
            == variance
        )
    with pytest.raises(ConfigError, match=f"--batch-invariant on is not possible.*{why}"):
        ModelPlan(msgspec.structs.replace(wanted, batch_invariant="on"))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_plan_on_a_cpu_refuses_plain_kernels(checkpoint: Path, backend: str) -> None:
    """Nothing of a CPU's kernels is turned off by the flag, so it must not be accepted."""
    fields = CONFIG | {"kernels": "plain", "attention_backend": backend}
    config = EngineConfig(model=str(checkpoint), **fields)
    with pytest.raises(ConfigError, match="--kernels plain is not possible on cpu"):
        ModelPlan(config)
