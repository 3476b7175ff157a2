"""An engine whose sums depend on the batch: `penstock verify` finds it and names the token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.folder import model_folder
from engine.client.client import ProcessClient
from engine.config import EngineConfig
from engine.runner.load import load_engine
from engine.runner.model_runner import ModelRunner
from tests.support.process import ROOT
from tests.support.recorded_requests import draw_uncertain, send_all
from tests.support.rig import Served, eventually, serving
from tests.support.thread_engine import ThreadChild

REQUESTS, PARTS = 20, 2

pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def split_sums() -> Iterator[None]:
    """Round the parts of each logit's sum to bfloat16 if a step has several rows.

    Kernels that split a sum by the number of rows, and keep the parts in half precision, do this.
    """
    exact = ModelRunner.logits

    def logits(runner: ModelRunner, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) == 1:
            return exact(runner, hidden)
        size = hidden.shape[1] // PARTS
        total = torch.zeros(())
        for start in range(0, hidden.shape[1], size):
            part = torch.zeros_like(hidden)
            part[:, start : start + size] = hidden[:, start : start + size]
            total = (total + exact(runner, part)).bfloat16()
        return total.float()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "logits", logits)
        yield


@contextlib.asynccontextmanager
async def service(record: Path) -> AsyncIterator[Served]:
    """The demo model in this process, behind a real server."""
    folder = model_folder("demo")
    config = EngineConfig(model=str(folder), dtype="float32", threads=1, device="cpu")
    child = ThreadChild(config, load_engine(config))
    client = ProcessClient(config, child)  # type: ignore[arg-type]
    async with serving(client, folder, record=str(record)) as served:  # type: ignore[arg-type]
        await client.wait_ready()
        yield served


async def verify(file: Path, url: str, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its exit status and the objects on stdout."""
    command = ["-m", "server", "verify", str(file), "--url", url, "--json", *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow
async def test_sum_that_depends_on_the_batch_is_found_and_its_first_token_named(
    tmp_path: Path,
) -> None:
    record, copy = tmp_path / "record.jsonl", tmp_path / "copy.jsonl"
    async with service(record) as served:
        url = f"http://127.0.0.1:{served.port}"
        await send_all(url, map(draw_uncertain, range(REQUESTS)), at_once=1)
        await eventually(lambda: record.read_text().count("\n") == REQUESTS, "all are recorded")
        copy.write_bytes(record.read_bytes())  # replays are recorded, too
        lines = [json.loads(line) for line in copy.read_text().splitlines()]

        status, found = await verify(copy, url, "--rounds", "1")
        assert (status, found[-1]["equal"]) == (0, REQUESTS)

        with split_sums():
            status, found = await verify(copy, url, "--rounds", "2")
    *differences, summary = found
    assert status == 1
    assert summary["different"] == len(differences) > REQUESTS // 4
    for difference in differences:
        line = lines[difference["line"] - 1]
        assert difference["event"] == "difference"
        assert difference["id"] == line["id"]
        assert difference["round"] >= 1  # never alone
        assert difference["company"]
        assert difference["line"] not in difference["company"]
        assert difference["expected"] == line["tokens"][difference["index"]]
        assert difference["got"] != difference["expected"]
