"""Several GPUs: sums in one launch, answers of two ranks, and a rank that is stopped.

These tests have not run yet: they need two GPUs in one machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from server import exit_codes
from tests.faults.test_ranks import follower_of
from tests.support.serve import Case, check, complete, greedy, serving

pytestmark = pytest.mark.gpu
FLAGS = ("--device", "cuda", "--dtype", "float32", "--tensor-parallel-size", "2")


@pytest.fixture(autouse=True)
def _two_gpus(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.mark.parametrize("count", [2, 4, 8])
def test_sums_in_one_launch_are_in_the_order_of_the_ranks(count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} NVIDIA GPUs")
    command = [sys.executable, "-m", "tests.gpu.rank_worker"]
    place = str(tmp_path / "place")
    workers = [
        subprocess.Popen([*command, str(own), str(count), place], stderr=subprocess.PIPE, text=True)
        for own in range(count)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors


async def test_answers_of_two_gpus_equal_golden(llama: Path, stories: list[Case]) -> None:
    with serving(llama, *FLAGS) as server:
        async with server.http() as http:
            for case in stories:
                check(await complete(http, greedy(case, stream=True)), case)
            [model] = (await http.get("/v1/models")).json()["data"]
            assert model["tensor_parallel_size"] == 2
            assert server.metric(
                "rank_memory_bytes", rank="1", use="NCCL, between the GPUs of ranks"
            )


async def test_stopped_rank_ends_a_stream_with_error(llama: Path, stories: list[Case]) -> None:
    with serving(llama, *FLAGS) as server:
        async with server.http() as http:
            check(await complete(http, greedy(stories[0])), stories[0])
            follower_of(server).suspend()
            body = {"prompt": "Once", "max_tokens": 400, "stream": True}
            answer = await http.post("/v1/completions", json=body)
            *_, last = answer.text.strip().split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert server.status() == exit_codes.ENGINE_DIED
