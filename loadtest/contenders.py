"""Whom `bench_cpu` measures: servers over HTTP, and transformers in this process."""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.http_client import closed_loop


@dataclass(frozen=True)
class Load:
    """Tokens of each request."""

    prompt: int
    new: int

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(300, 32000, (count, self.prompt), generator=generator).tolist()


Figures = tuple[float, float]  # output tokens/s, and the median gap in ms


class Server:
    """A process that serves OpenAI's API on a free port of the loopback address. `command` lacks
    the port; `ready` is the path that answers 200 once the model is loaded."""

    def __init__(self, command: list[str], ready: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_ready(ready, began + 120)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def _wait_ready(self, path: str, deadline: float) -> None:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    name = Path(self.process.args[0]).name  # type: ignore[index,arg-type]
                    raise SystemExit(f"{name} did not become ready") from None
                time.sleep(0.05)

    def measure(self, load: Load, concurrency: int, requests: int, seed: int) -> Figures:
        """Output tokens/s and the median gap in ms."""
        bodies = [
            {"prompt": p, "max_tokens": load.new, "temperature": 0, "ignore_eos": True}
            for p in load.prompts(requests, seed)
        ]
        wall, done = asyncio.run(closed_loop("127.0.0.1", self.port, bodies, concurrency))
        assert all(c.tokens == load.new for c in done), "a request came back short"
        gaps = [gap for c in done for gap in c.gaps]
        return sum(c.tokens for c in done) / wall, statistics.median(gaps) * 1e3

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class Penstock(Server):
    def __init__(self, folder: Path, flags: list[str]) -> None:
        command = [sys.executable, "-m", "server", "serve", str(folder)]
        super().__init__([*command, "--log-level", "warning", *flags], "/ready")


class LlamaCpp(Server):
    """llama.cpp's server, with as many slots as there are `streams`, each with room for one `load`.
    `program` is built for this machine; `model` a GGUF file."""

    def __init__(self, program: Path, model: Path, load: Load, streams: int) -> None:
        threads, context = torch.get_num_threads(), streams * (load.prompt + load.new + 1)
        sizes = ["--threads", str(threads), "--parallel", str(streams), "--ctx-size", str(context)]
        command = [str(program), "--model", str(model), *sizes]
        super().__init__([*command, "--host", "127.0.0.1"], "/health")


class Transformers:
    """`generate` in this process, a static batch, in the dtype of ours."""

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
        # generate streams only single sequences; longer batches are timed as a whole.
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
