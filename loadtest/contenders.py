"""The contenders of `bench_cpu`: servers over HTTP, and transformers in this process."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.http_client import closed_loop, streamed
from loadtest.schedule import Ask
from loadtest.servers import Server


@dataclass(frozen=True)
class Load:
    """The prompt and output tokens of each request."""

    prompt: int
    new: int

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(300, 32000, (count, self.prompt), generator=generator).tolist()


Figures = tuple[float, float]  # output tokens/s, and the median gap in ms


def over_http(server: Server, load: Load, concurrency: int, requests: int, seed: int) -> Figures:
    bodies = [streamed(Ask(0.0, p, load.new).body) for p in load.prompts(requests, seed)]
    run = closed_loop(server.address, "/v1/completions", bodies, concurrency)
    wall, done = asyncio.run(run)
    assert all(c.tokens == load.new for c in done), "a response has too few tokens"
    gaps = [gap for c in done for gap in c.gaps]
    return sum(c.tokens for c in done) / wall, statistics.median(gaps) * 1e3


class Transformers:
    """`generate` in this process, with a static batch, in the same dtype as Penstock."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):  # type: ignore[misc]
            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:
                self.times.append(time.monotonic())

            def end(self) -> None: ...

        self.clock = Clock
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def measure(self, load: Load, batch: int, seed: int) -> Figures:
        ids = torch.tensor(load.prompts(batch, seed))
        clock = self.clock()
        began = time.monotonic()
        # generate streams only single sequences; larger batches are timed as a whole.
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=load.new,
                min_new_tokens=load.new,
                do_sample=False,
                pad_token_id=0,
                streamer=clock if batch == 1 else None,
            )
        wall = time.monotonic() - began
        assert out.shape[1] == load.prompt + load.new
        gaps = [b - a for a, b in zip(clock.times[1:], clock.times[2:], strict=False)]
        return batch * load.new / wall, (statistics.median(gaps) if gaps else wall / load.new) * 1e3
