"""What `serve --plan` predicts is what a start then takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.runner.blueprint import Blueprint
from tests.engine.driver import Driver, tiny_llama


def peak_bytes(run: Any) -> int:
    """The most bytes of tensors made within `run` that were there at one moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


CONFIG: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 12}


def test_weights_kv_and_rows_to_the_byte(checkpoint: Path) -> None:
    config = CONFIG | {"num_gpu_blocks_override": 40}
    plan = Blueprint(EngineConfig(model=str(checkpoint), **config)).memory_plan()
    runner = Driver(checkpoint, prepack=False, **config).runner
    tables = sum(buffer.nbytes for buffer in runner.blueprint.module.buffers())
    assert plan.taken["weights"] == runner.weight_bytes + tables
    assert plan.taken["KV cache"] == runner.kv.num_bytes
    assert plan.taken["rows"] == runner.rows.num_bytes
    assert (plan.num_blocks, plan.max_model_len) == (40, runner.max_model_len)


@pytest.mark.parametrize(
    ("shape", "prompts", "params"),
    [
        ({"intermediate_size": 4096}, [192], {}),
        ({"vocab_size": 100_000}, [4] * 48, {"temperature": 1.0, "top_p": 0.9}),
        ({"max_position_embeddings": 2048}, [2000], {}),
    ],
    ids=["layers", "logits", "attention"],
)
def test_the_largest_step_takes_about_what_was_predicted(
    tmp_path: Path, shape: dict[str, int], prompts: list[int], params: dict[str, float]
) -> None:
    folder = tiny_llama(tmp_path, **shape)
    driver = Driver(folder, max_num_batched_tokens=192, max_num_seqs=len(prompts))
    for number, length in enumerate(prompts):
        driver.submit([1 + number, *[5] * (length - 1)], 2, **params)
    taken = max(peak_bytes(driver.turn) for _ in range(-(-max(prompts) // 192)))
    predicted = driver.runner.blueprint.step_bytes
    assert predicted / 2 < taken < predicted * 1.5


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "serve", *arguments, "--plan", "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_prints_it_and_reads_no_weights(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    done = plan(str(tmp_path), "--load-format", "dummy", "--kv-cache-memory-bytes", "1MiB")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    for line in ("weights", "KV cache", "rows", "largest step", "in all", "free now", "left"):
        assert any(row.rstrip().endswith(line) for row in done.stdout.splitlines()), line


def test_what_does_not_fit_ends_with_status_2(checkpoint: Path) -> None:
    done = plan(str(checkpoint), "--num-gpu-blocks-override", "1", "--max-model-len", "256")
    assert done.returncode == 2
    assert "--num-gpu-blocks-override 4" in done.stderr
