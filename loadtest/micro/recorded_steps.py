"""CPU time of recorded steps, and of the same steps launched from Python.

The model has the sizes of SmolLM2-135M and weights without meaning. CPU time of one thread hardly
depends on other programs. It leaves out what several threads gain by staying in one region.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from engine.config import EngineConfig
from engine.runner.forward import Forward
from loadtest.inprocess import Engine, Work
from loadtest.micro.case import Case, Table, in_turn

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
RECORDED, PYTHON = "recorded", "Python"
PROMPTS, STREAMS = (200, 1050), (1, 8, 16, 32, 64)
WARM_UP, STEPS = 4, 12  # steps of all streams that are not timed, and that are


class Steps:
    """Times the steps of one engine with one thread, with and without its programs."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(EngineConfig(model=str(folder), load_format="dummy", threads=1))
        self._programs = self._engine.runner.programs
        self._prompts = 0

    def ways(self, measure: Callable[[], float]) -> dict[str, Callable[[int], float]]:
        """Return both ways of `measure`. Its steps are recorded before."""

        def measure_with(programs: Forward | None) -> float:
            self._engine.runner.programs = programs
            return measure()

        for _ in range(2):
            measure_with(self._programs)
        return {
            PYTHON: lambda turn: measure_with(None),
            RECORDED: lambda turn: measure_with(self._programs),
        }

    def prompt(self, length: int) -> float:
        """Return the milliseconds of a prompt that has no prefix in the cache."""
        work = self._work(length, 1)
        began = time.process_time()
        self._engine.generate([work])
        return 1000 * (time.process_time() - began)

    def decode(self, streams: int) -> float:
        """Return the mean milliseconds of a step of all streams, each behind a short prompt."""
        ids = self._engine.submit([self._work(24, 200) for _ in range(streams)])
        while len(self._engine.core.scheduler.running) < streams:
            self._engine.core.turn()
        for _ in range(WARM_UP):
            self._engine.core.turn()
        began = time.process_time()
        for _ in range(STEPS):
            self._engine.core.turn()
        took = time.process_time() - began
        self._engine.abort(ids)
        return 1000 * took / STEPS

    def _work(self, length: int, max_tokens: int) -> Work:
        self._prompts += 1
        first = 3 + self._prompts
        return Work([first, *range(1000, 1000 + length - 1)], max_tokens)


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": options.layers}))
    steps = Steps(folder)
    for length in PROMPTS:
        samples = in_turn(steps.ways(partial(steps.prompt, length)), options.rounds)
        yield Table(samples, f"ms of CPU, a prompt of {length} tokens", (PYTHON,))
    for streams in STREAMS:
        samples = in_turn(steps.ways(partial(steps.decode, streams)), options.rounds)
        yield Table(samples, f"ms of CPU, a step of {streams} streams", (PYTHON,))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each table (default 5)")
    parser.add_argument("--layers", type=int, default=30, help="of the model (default 30)")


CASE = Case(__doc__ or "", add_options, measure)
