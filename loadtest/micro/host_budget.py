"""The host's time per decode step, without a device.

The engine's own loop serves the demo model with 256 sequences, at depth 1, but replaying a graph
does nothing. The remaining time is the host's: it schedules a step, launches it and retires the
previous one. As long as this takes less than a step on the device, the device never waits.
"""

from __future__ import annotations

import cProfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec

from engine.assembly import make_core
from engine.config import EngineConfig
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.message import Message
from engine.protocol.wire import ToEngine
from engine.runner.load import load_engine
from engine.runner.step_graphs import StepGraphs
from loadtest.micro.case import Case, Table

PROMPT = 20  # tokens of each prompt
WARM_UP = 20  # steps
TOKEN = 5  # the answer of every replay; not one that ends a text


class NoDevice:
    """A Recorder that computes nothing, neither now nor in its replays."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class Requests:
    """The core's endpoint: delivers requests once, and encodes messages like the zmq endpoint."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._requests = requests
        self._encode = msgspec.msgpack.Encoder().encode

    def drain(self, *, block: bool) -> list[ToEngine]:
        requests, self._requests = self._requests, []
        return list(requests)

    def send(self, message: Message) -> None:
        self._encode(message)


def measure(sequences: int, steps: int, profile: bool) -> dict[str, list[float]]:
    """Return the microseconds of each part in each of `steps` decode steps."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        threads=1,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * PROMPT,
        max_model_len=PROMPT + WARM_UP + steps + 64,
        enable_prefix_caching=True,
        speculation="off",  # the equal tokens of all replays would be drafted
    )
    params = SamplingParams(max_tokens=WARM_UP + steps + 32, temperature=0.8, top_p=0.95)
    prompts = [[1 + (n + i) % 500 for i in range(PROMPT)] for n in range(sequences)]
    requests = [GenerateRequest(n, prompt, params, 0.0) for n, prompt in enumerate(prompts)]
    loaded = load_engine(config, recorder=NoDevice())
    core = make_core(config, loaded, Requests(requests), depth=1)
    took: dict[str, list[float]] = defaultdict(list)
    timed(core.scheduler, "schedule", took)
    timed(core.runner, "launch", took)
    timed(core, "publish", took)
    graphs = core.runner.graphs
    assert isinstance(graphs, StepGraphs)
    while graphs.capture_next():
        pass
    graphs.tokens.fill_(TOKEN)
    for _ in range(WARM_UP):
        core.turn()
    took.clear()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(steps):
        began = time.thread_time()
        core.turn()
        took["in all"].append((time.thread_time() - began) * 1e6)
    if profile:
        profiler.disable()
        profiler.print_stats("tottime")
    assert len(core.scheduler.running) == sequences
    return took


def timed(owner: Any, name: str, took: dict[str, list[float]]) -> None:
    """Wrap a method so that `took` collects the microseconds of each call."""
    method = getattr(owner, name)

    def noting(*args: Any) -> Any:
        began = time.thread_time()
        result = method(*args)
        took[name].append((time.thread_time() - began) * 1e6)
        return result

    setattr(owner, name, noting)


def run(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    yield Table(measure(options.sequences, options.steps, options.profile), "us of CPU per step")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="print a profile of the loop")


CASE = Case(__doc__, add_options, run)
