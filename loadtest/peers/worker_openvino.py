"""A worker for OpenVINO GenAI's continuous batching, which has no HTTP server."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov  # type: ignore
import openvino_genai as genai  # type: ignore

from loadtest.peers.worker import Measure, Setup, Times, WorkerJob, work


def load(setup: Setup) -> Measure:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = max(setup.streams, 32)
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = 2  # GB
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        setup.model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
    )
    return lambda job: measure(pipeline, job)


def measure(pipeline: Any, job: WorkerJob) -> Times:
    config = genai.GenerationConfig(max_new_tokens=job.new, min_new_tokens=job.new, ignore_eos=True)
    config.do_sample = False
    began, times = time.monotonic(), Times()
    waiting = list(enumerate(job.prompts))
    running: dict[int, Request] = {}
    while waiting or running:
        while waiting and is_due(job, began, waiting[0][0], len(running)):
            number, ids = waiting.pop(0)
            started = began + job.arrivals[number] if job.arrivals else time.monotonic()
            handle = pipeline.add_request(number, ov.Tensor(np.array([ids])), config)
            running[number] = Request(handle, started, len(ids))
        if not running:
            time.sleep(0.001)
            continue
        pipeline.step()
        for number, request in list(running.items()):
            if not request.read():
                times.add(request.started, request.arrivals, request.tokens, request.prompt_tokens)
                del running[number]
    return times


def is_due(job: WorkerJob, began: float, number: int, running: int) -> bool:
    if job.arrivals:
        return time.monotonic() >= began + job.arrivals[number]
    return running < job.streams


class Request:
    def __init__(self, handle: Any, started: float, prompt_tokens: int) -> None:
        self.started, self.prompt_tokens = started, prompt_tokens
        self.arrivals: list[float] = []
        self.tokens = 0
        self._handle = handle

    def read(self) -> bool:
        """Take the tokens of the last step; return whether the request is still running."""
        while self._handle.can_read():
            self.tokens += sum(len(out.generated_ids) for out in self._handle.read().values())
            self.arrivals.append(time.monotonic())
        return bool(self._handle.get_status() == genai.GenerationStatus.RUNNING)


if __name__ == "__main__":
    work(load)
