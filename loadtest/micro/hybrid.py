"""The cost of recurrent layers: a hybrid next to a Llama of equal size, both with random weights.

Three quarters of the hybrid's layers are gated delta nets, as in Qwen3.5, and the others attend.
Both engines run in this process and take turns. Measured are a decode step by its context and by
its number of streams, a prompt, and a prompt that begins like an earlier one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from loadtest.inprocess import Engine, Work
from loadtest.micro.case import Bound, Case, Samples, Table, in_turn
from loadtest.random_model import LLAMA_125M

CONTEXT = 8448
LLAMA = LLAMA_125M | {"max_position_embeddings": CONTEXT}
# Of SmolLM2-135M's width. The MLP is narrower, so that both models have equally many weights.
HYBRID = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "intermediate_size": 1216,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 9,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
LENGTHS, STREAMS = (128, 1000, 2000, 4000, 8000), (1, 8)
PROMPT, SHARED = 1050, 1000
Figure = Callable[[int], float]  # of a round
GROWTH, SHARE, PREFILL, HIT = 0.35, 0.9, 0.5, 0.2  # the bounds


def load(folder: Path, config: Mapping[str, Any], threads: int) -> Engine:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            threads=threads or None,
            max_num_seqs=16,
            speculation="off",
            kv_cache_memory_bytes=2 << 30,
            state_memory_bytes=1 << 30,
        )
    )


def prompt(length: int, seed: int) -> list[int]:
    return [3 + (seed * 7919 + place * place + 31 * place) % 30000 for place in range(length)]


def step(engine: Engine, length: int, streams: int, steps: int) -> Figure:
    """Return what measures the median milliseconds of a decode step at this context."""

    def measured(turn: int) -> float:
        works = [Work(prompt(length, 100 * turn + n), steps + 32) for n in range(streams)]
        return 1000 * statistics.median(engine.decode_seconds(works, steps))

    return measured


def growth(samples: Samples) -> dict[str, list[float]]:
    """Return by how much each model's step grows from the shortest to the longest context."""
    shortest, longest = LENGTHS[0], LENGTHS[-1]
    found = {}
    for name in ("Llama", "hybrid"):
        pairs = zip(samples[f"{name} {longest}"], samples[f"{name} {shortest}"], strict=True)
        found[name] = [long - short for long, short in pairs]
    return found


def rates(
    samples: Samples, engines: Mapping[str, Engine], streams: int, *, states: bool
) -> dict[str, list[float]]:
    """Return the GB/s at which the steps read the weights, and with `states` move these, too."""
    found = {}
    for name, engine in engines.items():
        moved = engine.loaded.facts.weight_bytes
        if states:  # each stream's is read and written
            moved += 2 * streams * engine.loaded.plan.states.slot_bytes
        found[name] = [moved / ms / 1e6 for ms in samples[f"{name}, {streams}"]]
    return found


def prefill(engine: Engine) -> Figure:
    """Return what measures the tokens per second of a new prompt."""
    return lambda turn: PROMPT / engine.generate([Work(prompt(PROMPT, 7000 + turn), 1)])


def hit(engine: Engine, seed: int) -> float:
    """Return the seconds of a prompt whose beginning was computed before."""
    known = prompt(PROMPT, seed)
    engine.generate([Work(known, 1)])
    other = known[:SHARED] + prompt(PROMPT - SHARED, seed + 1)
    return engine.generate([Work(other, 1)])


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engines = {
        "Llama": load(root / "llama", LLAMA, options.threads),
        "hybrid": load(root / "hybrid", HYBRID, options.threads),
    }
    notes = {
        name: f"{engine.loaded.facts.parameters / 1e6:.1f} M parameters"
        for name, engine in engines.items()
    }
    rounds, steps = options.rounds, options.steps
    found = in_turn(
        {
            f"{name} {length}": step(engine, length, 1, steps)
            for length in LENGTHS
            for name, engine in engines.items()
        },
        rounds,
    )
    yield Table(found, "ms a step, by tokens of context")
    bound = Bound("hybrid", "Llama", GROWTH, at_most=True)
    yield Table(growth(found), "ms that the longest context adds", ("Llama",), (bound,), notes)
    found = in_turn(
        {
            f"{name}, {streams}": step(engine, LENGTHS[0], streams, steps)
            for streams in STREAMS
            for name, engine in engines.items()
        },
        rounds,
    )
    yield Table(found, "ms a step, by streams")
    for streams in STREAMS:
        shares = rates(found, engines, streams, states=False)
        bound = Bound("hybrid", "Llama", SHARE)
        yield Table(shares, f"GB/s of weights, {streams} streams", ("Llama",), (bound,))
        # A hybrid also moves states, in fp32: with eight streams a fifth of the weights' bytes.
        shares = rates(found, engines, streams, states=True)
        yield Table(shares, f"GB/s of weights and states, {streams} streams", ("Llama",))
    found = in_turn({name: prefill(engine) for name, engine in engines.items()}, rounds)
    bound = Bound("hybrid", "Llama", PREFILL)
    yield Table(found, f"tokens/s of a prompt of {PROMPT}", ("Llama",), (bound,))
    hybrid = engines["hybrid"]
    found = in_turn(
        {
            "miss": lambda turn: hybrid.generate([Work(prompt(PROMPT, 9000 + turn), 1)]),
            "hit": lambda turn: hit(hybrid, 11000 + 2 * turn),
        },
        rounds,
    )
    bound = Bound("hit", "miss", HIT, at_most=True)
    yield Table(found, f"s of a hybrid's prompt; a hit shares {SHARED}", ("miss",), (bound,))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each table (default 7)")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a figure")
    parser.add_argument("--threads", type=int, default=0, help="of the engines; 0: all cores")


CASE = Case(__doc__ or "", add_options, measure)
