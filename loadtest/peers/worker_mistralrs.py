"""A worker for mistral.rs, whose package has no HTTP server. Its prompts are texts."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which  # type: ignore

from loadtest.peers.worker import Measure, Setup, Times, WorkerJob, work

TEMPLATE = "{{ messages[0]['content'] }}"  # the prompt as it is: only chats can be streamed


def load(setup: Setup) -> Measure:
    which = Which.Plain(model_id=setup.model, dtype=ModelDType.BF16)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "plain.jinja"
        template.write_text(TEMPLATE)
        runner = Runner(which=which, max_seqs=max(setup.streams, 32), jinja_explicit=str(template))
    return lambda job: measure(runner, job)


def measure(runner: Any, job: WorkerJob) -> Times:
    """Send all requests: from a thread for each stream, or for each request that arrives."""
    times, lock, began = Times(), threading.Lock(), time.monotonic()
    queue: SimpleQueue[str] = SimpleQueue()
    for prompt in job.prompts:
        queue.put(prompt)

    def client() -> None:
        while True:
            try:
                prompt = queue.get_nowait()
            except Empty:
                return
            send(prompt, time.monotonic())

    def arrive(prompt: str, at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        send(prompt, at)

    def send(prompt: str, started: float) -> None:
        arrivals, usage = stream(runner, prompt, job.new)
        with lock:  # Times has several lists
            times.add(started, arrivals, usage.completion_tokens, usage.prompt_tokens)

    threads = [threading.Thread(target=client) for _ in range(job.streams)]
    if job.arrivals:
        arriving = zip(job.prompts, job.arrivals, strict=True)
        threads = [threading.Thread(target=arrive, args=(p, began + at)) for p, at in arriving]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def stream(runner: Any, prompt: str, new: int) -> tuple[list[float], Any]:
    """Return the times of a response's chunks, and its usage."""
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": prompt}],
        model="default",
        max_tokens=new,
        temperature=0.0,
        stream=True,
        ignore_eos=True,
    )
    usage, arrivals = None, []
    for chunk in runner.send_chat_completion_request(request):
        usage = getattr(chunk, "usage", None) or usage
        arrivals.append(time.monotonic())
    if usage is None:
        raise RuntimeError("the last chunk has no usage")
    return arrivals, usage


if __name__ == "__main__":
    work(load)
