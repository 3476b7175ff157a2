"""Run one measurement with OpenVINO GenAI's continuous batching, in its environment: no HTTP.

Reads a job as JSON from stdin: model (GGUF file), prompts (token ids), new, streams. Prints
{"wall": seconds, "arrivals": [[seconds, ...], ...], "tokens": [...], "started": [...]}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov  # type: ignore
import openvino_genai as genai  # type: ignore


def main() -> None:
    job = json.load(sys.stdin)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = max(job["streams"], 1)
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = 2  # GB
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        job["model"], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
    )
    measure(pipeline, job["prompts"][: job["streams"]], 8, job["streams"])
    print(json.dumps(measure(pipeline, job["prompts"], job["new"], job["streams"])))


def measure(pipeline: Any, prompts: list[list[int]], new: int, streams: int) -> dict[str, Any]:
    config = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True)
    waiting = list(enumerate(prompts))
    running: dict[int, Any] = {}
    started, arrivals = [0.0] * len(prompts), [[] for _ in prompts]  # type: ignore
    tokens = [0] * len(prompts)
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < streams:
            number, ids = waiting.pop(0)
            started[number] = time.monotonic()
            running[number] = pipeline.add_request(number, ov.Tensor(np.array([ids])), config)
        pipeline.step()
        now = time.monotonic()
        for number, handle in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    tokens[number] += len(output.generated_ids)
                arrivals[number].append(now)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[number]
    wall = time.monotonic() - began
    return {"wall": wall, "started": started, "arrivals": arrivals, "tokens": tokens}


main()
