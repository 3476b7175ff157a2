"""Time that a viewer costs per step, without a model.

A scheduler runs decode steps. The time of the engine process is that of the StepTrace and its
encoding; that of the API process is decoding it and rebuilding the block tables, and
a tenth of a frame. All times are CPU time of the thread.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

import msgspec
import orjson

from engine.client.inspection import InspectedEngine
from engine.inspect.watch import EngineWatch
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.outputs import StepOutputs
from engine.protocol.watch import StepTrace
from engine.protocol.wire import FromEngine
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import SampledToken
from loadtest.micro.case import Case, Table
from server.glassbox.requests.report import Reader
from server.glassbox.requests.step_log import Recorder
from server.glassbox.watch.block_map import BlockMap
from server.glassbox.watch.frames import FrameWriter
from server.glassbox.watch.live_engine import LiveEngine
from server.glassbox.watch.viewer import Counts, TracedStep

PROMPT = 20  # tokens
STEPS_A_FRAME = 10


@dataclass
class Times:
    """Seconds of CPU in each step or frame."""

    engine: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)
    frame_bytes: list[float] = field(default_factory=list)


def measure(sequences: int, steps: int) -> Times:
    scheduler = Scheduler(
        num_blocks=sequences * (1 + steps // 32),
        block_size=64,
        max_model_len=steps + 2 * PROMPT,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * PROMPT,
    )
    for number in range(1, sequences + 1):
        params = SamplingParams(steps + 1)
        scheduler.add(GenerateRequest(number, [number] * PROMPT, params, 0.0))
    watch = EngineWatch(scheduler)
    block_map = BlockMap(watch.blocks(1, scheduler.stats()))
    live = LiveEngine(cast(InspectedEngine, None), Recorder([]))
    live.map = block_map
    writer = FrameWriter(live)
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(FromEngine).decode
    times, pending = Times(), list[TracedStep]()
    for number in range(steps):
        step = scheduler.schedule()
        assert step is not None
        tokens = scheduler.retire(step, [SampledToken(5) for s in step.slices if s.samples])
        stats = scheduler.stats(step, 0.01)
        outputs = StepOutputs(0.0, tokens, scheduler.waiting.take_admissions(0.0), stats)
        began = time.thread_time()
        wire = encode(watch.trace(stats, step, 1.0, 1.1))
        times.engine.append(time.thread_time() - began)
        began = time.thread_time()
        trace = decode(wire)
        assert isinstance(trace, StepTrace)
        changed = block_map.apply(trace, [outputs])
        times.server.append(time.thread_time() - began)
        pending.append(TracedStep(number, 0.0, 1.0, trace, changed, stats, Counts()))
        if len(pending) == STEPS_A_FRAME:
            began = time.thread_time()
            frame = orjson.dumps(writer.frame(pending, Reader(sees_all=True, names={})))
            times.frames.append(time.thread_time() - began)
            times.frame_bytes.append(len(frame))
            pending = []
    return times


def run(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    for sequences in options.sequences:
        times = measure(sequences, options.steps)
        yield Table(
            {
                f"{sequences} streams, engine process": [1e6 * one for one in times.engine],
                f"{sequences} streams, API process": [1e6 * one for one in times.server],
                f"a tenth of a frame of {STEPS_A_FRAME} steps": [
                    1e6 * one / STEPS_A_FRAME for one in times.frames
                ],
            },
            "us of CPU per step",
        )
        yield Table({f"{sequences} streams": times.frame_bytes}, "bytes of a frame")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=2000)


CASE = Case(__doc__, add_options, run)
