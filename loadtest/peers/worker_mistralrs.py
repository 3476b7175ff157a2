"""Run one measurement with mistral.rs, in its environment, which has no HTTP server.

Reads a job as JSON from stdin: model (folder), texts, new, streams. Prints {"wall": seconds,
"prompt_tokens": [...], "arrivals": [[seconds, ...], ...], "tokens": [...], "started": [...]}.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which  # type: ignore


def main() -> None:
    job = json.load(sys.stdin)
    which = Which.Plain(model_id=job["model"], dtype=ModelDType.BF16)
    runner = Runner(which=which, max_seqs=max(job["streams"], 2), prefix_cache_n=0)
    warm = job["texts"][: job["streams"]]
    measure(runner, warm, 8, job["streams"])
    print(json.dumps(measure(runner, job["texts"], job["new"], job["streams"])))


def measure(runner: Any, texts: list[str], new: int, streams: int) -> dict[str, Any]:
    queue: SimpleQueue[str] = SimpleQueue()
    for text in texts:
        queue.put(text)
    found: dict[str, Any] = {"started": [], "arrivals": [], "tokens": [], "prompt_tokens": []}

    def client() -> None:
        while True:
            try:
                text = queue.get_nowait()
            except Empty:
                return
            started, arrivals, usage = time.monotonic(), [], None
            request = ChatCompletionRequest(
                messages=[{"role": "user", "content": text}],
                model="default",
                max_tokens=new,
                temperature=0.0,
                stream=True,
                ignore_eos=True,
            )
            for chunk in runner.send_chat_completion_request(request):
                usage = getattr(chunk, "usage", None) or usage
                arrivals.append(time.monotonic())
            found["started"].append(started)
            found["arrivals"].append(arrivals)
            found["tokens"].append(usage.completion_tokens if usage else len(arrivals))
            found["prompt_tokens"].append(usage.prompt_tokens if usage else 0)

    began = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found | {"wall": time.monotonic() - began}


main()
