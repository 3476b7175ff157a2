"""A worker for transformers: `generate` with static batches of one prompt for each stream."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from loadtest.peers.worker import Measure, Setup, Times, WorkerJob, work


def load(setup: Setup) -> Measure:
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16).eval()
    return lambda job: measure(model, job)


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of each step and stops no sequence. It is called for batches of any size."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.monotonic())
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def measure(model: Any, job: WorkerJob) -> Times:
    if job.arrivals:
        raise SystemExit("a static batch takes no requests that arrive later")
    times = Times()
    for first in range(0, len(job.prompts), job.streams):
        ids = torch.tensor(job.prompts[first : first + job.streams])  # [batch, prompt]
        clock, started = Clock(), time.monotonic()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.new,
                min_new_tokens=job.new,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        for row in out:
            times.add(started, clock.times, len(row) - ids.shape[1], ids.shape[1])
    return times


if __name__ == "__main__":
    work(load)
