"""Cost curves of Penstock on this CPU: `python -m loadtest.curves`.

Each curve is measured at several points and compared with the law that it should follow. A law has
one or two constants, fitted to the medians. A curve that leaves its law shows an unplanned
cost. Speeds are those of a server over HTTP, as installed.

The command also measures shares of the machine's rates in process: the weights read in a decode
step of one sequence, and the multiplications of a prompt of 256 tokens. The last measurement is the
gaps of arriving requests, alone and while a prompt of 3,000 tokens arrives every second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from loadtest.bench_cpu import counts, matmul_rate, read_rate
from loadtest.bench_peers import model_folder
from loadtest.charts import Dot, Line, chart, document
from loadtest.http_client import closed_loop, streamed
from loadtest.inprocess import Engine, Work
from loadtest.micro.host_budget import timed
from loadtest.peers.contenders import open_loop
from loadtest.peers.figures import percentile, resident_mb
from loadtest.peers.jobs import ARRIVING_S, CLOSED, SATURATING, Words, arriving_job
from loadtest.peers.report import commit, processor
from loadtest.program import run_program
from loadtest.schedule import Ask
from loadtest.servers import Penstock

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)  # tokens
QUEUES = (1, 10, 100, 1000, 10_000)  # waiting requests
HELD = (1000, 2000, 4000, 8000, 16_000, 32_000)  # tokens in the KV cache
PROMPT, NEW = 128, 64  # tokens of a request of the curves over streams
LONG, LONG_EVERY_S = 3000, 1.0  # the prompts that disturb others
DISTURBED_SHARE = 0.5  # of the rate with 32 streams, at which requests arrive
PREFILL = 256  # tokens of the prompt whose multiplications are timed
SEQUENCES, SETTLE, STEPS = 8, 20, 200  # of the scheduler's curve
BF16 = 2  # bytes

Law = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x, measured) -> expected


def affine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a + b x, fitted by least squares of the relative errors."""
    terms = np.stack([np.ones_like(x), x], 1) / y[:, None]
    (a, b), *_ = np.linalg.lstsq(terms, np.ones_like(y), rcond=None)
    return np.asarray(a + b * x)


def saturating(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x / (a + b x): the throughput of x streams whose round takes a + b x seconds."""
    return np.asarray(x / affine(x, x / y))


def constant(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.full_like(y, np.median(y))


def with_slope(slope: float) -> Law:
    """Return the law a + slope x, where only a is fitted."""
    return lambda x, y: np.median(y - slope * x) + slope * x


@dataclass(frozen=True)
class Curve:
    """Measured values by point, one for each round, and the law of their medians."""

    title: str
    unit: str
    axis: str
    law: str
    points: Mapping[int, Sequence[float]]
    expected: Sequence[float]  # by the law, at each point

    @classmethod
    def fitted(
        cls,
        title: str,
        unit: str,
        axis: str,
        points: Mapping[int, Sequence[float]],
        law: str,
        f: Law,
    ) -> Curve:
        medians = np.array([statistics.median(values) for values in points.values()])
        expected = f(np.array(list(points), float), medians)
        return cls(title, unit, axis, law, dict(points), expected.tolist())

    @property
    def medians(self) -> list[float]:
        return [statistics.median(values) for values in self.points.values()]

    @property
    def worst(self) -> float:
        """The largest difference between a median and the law, as a share of the law."""
        pairs = zip(self.medians, self.expected, strict=True)
        return max(abs(value / law - 1) for value, law in pairs)

    def chart(self) -> str:
        def dots(values: Sequence[float]) -> list[Dot]:
            pairs = zip(self.points, values, strict=True)
            return [Dot(x, y, f"{x}: {y:.4g} {self.unit}") for x, y in pairs]

        rounds = [Dot(x, y) for x, values in self.points.items() for y in values]
        lines = [Line("measured", dots(self.medians), rounds), Line(self.law, dots(self.expected))]
        return chart(self.title, self.unit, self.axis, lines)

    def __str__(self) -> str:
        pairs = zip(self.points, self.medians, strict=True)
        points = ", ".join(f"{x}: {y:.4g}" for x, y in pairs)
        return f"{self.title} ({self.unit}) by {self.axis}: {points}. {self.law}: ±{self.worst:.0%}"


def over_streams(folder: Path, words: Words, rounds: int) -> list[Curve]:
    """Measure output tokens/s and the median gap of 1 to 128 streams."""
    rates, gaps = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    with Penstock(folder, []) as server:
        for number in range(rounds):
            for streams in STREAMS:
                prompts = words.prompts(max(2, streams), PROMPT, f"{number} {streams}")
                wall, found = ask(server, prompts, NEW, streams)
                rates[streams].append(len(prompts) * NEW / wall)
                gaps[streams].append(1e3 * statistics.median(found))
    axis = "streams"
    return [
        Curve.fitted("Output", "tokens/s", axis, rates, "n / (a + b n)", saturating),
        Curve.fitted("Gap", "ms", axis, gaps, "a + b n", affine),
    ]


def over_context(folder: Path, words: Words, rounds: int) -> list[Curve]:
    """Measure the median gap of one stream, by the tokens of its prompt."""
    gaps = defaultdict[int, list[float]](list)
    with Penstock(folder, []) as server:
        for _ in range(rounds):
            for context in CONTEXTS:  # the prefix cache has the prompt in later rounds
                prompts = words.prompts(1, context, f"{context}")
                gaps[context].append(1e3 * statistics.median(ask(server, prompts, NEW, 1)[1]))
    return [Curve.fitted("Gap", "ms", "tokens of context", gaps, "a + b n", affine)]


def ask(
    server: Penstock, prompts: Sequence[list[int]], new: int, streams: int
) -> tuple[float, list[float]]:
    """Send all prompts in a closed loop; return (wall seconds, all gaps in seconds)."""
    bodies = [streamed(Ask(0.0, prompt, new).body) for prompt in prompts]
    wall, done = asyncio.run(closed_loop(server.address, "/v1/completions", bodies, streams))
    if wrong := [one.tokens for one in done if one.tokens != new]:
        raise RuntimeError(f"{wrong[0]} tokens of output instead of {new}")
    return wall, [gap for one in done for gap in one.gaps]


def over_queue() -> list[Curve]:
    """Measure the scheduler's CPU time per step of 8 decodes, by the number of waiting requests."""
    took = defaultdict[int, list[float]](list)
    most = max(QUEUES) + SEQUENCES
    config = EngineConfig(
        device="cpu", max_num_seqs=SEQUENCES, max_num_queued_reqs=most, max_num_queued_tokens=2**20
    )
    engine = Engine(config)
    parts: dict[str, list[float]] = defaultdict(list)
    timed(engine.core.scheduler, "schedule", parts)
    for waiting in QUEUES:
        works = [Work([1 + n % 500, 7, 8], 2 * STEPS) for n in range(SEQUENCES + waiting)]
        ids = engine.submit(works)
        for _ in range(SETTLE):
            engine.core.turn()
        parts.clear()
        for _ in range(STEPS):
            engine.core.turn()
        assert len(engine.core.scheduler.running) == SEQUENCES
        took[waiting] = list(parts["schedule"])
        engine.abort(ids)
    law = "the same for any queue"
    return [Curve.fitted("Scheduling", "µs a step", "waiting requests", took, law, constant)]


def over_tokens(folder: Path, words: Words, kv_bytes: int) -> list[Curve]:
    """Measure the resident memory of the server's processes by the tokens in its KV cache."""
    held, tokens = dict[int, list[float]](), 0
    room = 2 * max(HELD) * kv_bytes
    with Penstock(folder, ["--kv-cache-memory-bytes", str(room)]) as server:
        ask(server, words.prompts(2, PROMPT, "warm-up"), NEW, 1)
        for target in HELD:
            prompts = words.prompts((target - tokens) // 1000, 1000, f"{target}")
            ask(server, prompts, 1, 1)
            tokens = target
            held[target] = [resident_mb(server.process.pid)]
    law = f"a + {kv_bytes:,} bytes a token"
    title, axis = "Resident memory", "tokens in the KV cache"
    return [Curve.fitted(title, "MB", axis, held, law, with_slope(kv_bytes / 1e6))]


def disturbed(folder: Path, words: Words, rate: float, rounds: int) -> dict[str, list[float]]:
    """Return the p99 of the gaps in ms, alone and with the long prompts, one for each round.

    `rate` is in requests/s. Gaps of the long prompts are not counted: they have no second token.
    """
    found: dict[str, list[float]] = {"alone_ms": [], "disturbed_ms": []}
    with Penstock(folder, []) as server:
        for number in range(rounds):
            for name, count in (("alone_ms", 0), ("disturbed_ms", int(ARRIVING_S / LONG_EVERY_S))):
                job = arriving_job(CLOSED[SATURATING], words, f"{name} {number}", rate)
                long = words.prompts(count, LONG, f"long {number}")
                asks = [
                    *(Ask(at, p, NEW) for at, p in zip(job.arrivals, job.prompts, strict=True)),
                    *(Ask(LONG_EVERY_S * n, prompt, 1) for n, prompt in enumerate(long)),
                ]
                bodies, arrivals = [streamed(each.body) for each in asks], [e.at for e in asks]
                times = asyncio.run(open_loop(server.address, bodies, arrivals))
                gaps = [b - a for events in times.arrivals for a, b in pairwise(events)]
                found[name].append(1e3 * percentile(gaps, 99))
    return found


def shares(folder: Path, config: Mapping[str, object]) -> dict[str, float]:
    """Return the shares of the machine's rates, and the rates, measured just before and after."""
    body, head, kv = counts(config)
    rates = [(read_rate(), matmul_rate(torch.bfloat16))]
    engine = Engine(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(300, 30000, (length,), generator=generator).tolist()

    engine.generate([Work(prompt(PREFILL), NEW)])
    step = statistics.median(engine.decode_seconds([Work(prompt(PROMPT), 4 * NEW)], 2 * NEW))
    prefill = statistics.median(engine.generate([Work(prompt(PREFILL), 1)]) for _ in range(9))
    rates.append((read_rate(), matmul_rate(torch.bfloat16)))
    gbytes, gflops = map(max, zip(*rates, strict=True))
    values = body + head + kv * (PROMPT + NEW)
    return {
        "decode_ms": 1e3 * step,
        "read_share": BF16 * values / step / (gbytes * 1e9),
        "prefill_ms": 1e3 * prefill,
        "matmul_share": 2 * (body * PREFILL + head) / prefill / (gflops * 1e9),
        "gbytes": gbytes,
        "gflops": gflops,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, 125m, 1.1b, or a folder of a Llama"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-shares", action="store_true", help="without curves and arrivals")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=Path("build/curves.json"))
    return parser.parse_args(arguments)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything on one model; print each result as it comes."""
    words = Words(Tokenizer.from_file(str(folder / "tokenizer.json")))
    config = json.loads((folder / "config.json").read_text())
    report: dict[str, Any] = {"shares": shares(folder, config)}
    print(report["shares"], flush=True)
    if options.only_shares:
        return report | {"curves": []}
    curves: list[Curve] = []

    def add(more: Sequence[Curve]) -> None:
        curves.extend(more)
        print(*more, sep="\n", flush=True)

    add(over_queue())
    add(over_tokens(folder, words, BF16 * counts(config).kv))
    add(over_context(folder, words, options.rounds))
    add(over_streams(folder, words, options.rounds))
    output = next(curve for curve in curves if curve.title == "Output")
    rate = DISTURBED_SHARE * statistics.median(output.points[32]) / NEW
    report["disturbed"] = {"rate": rate} | disturbed(folder, words, rate, options.rounds)
    print(report["disturbed"], flush=True)
    return report | {"curves": curves}


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    with model_folder(options.model, options.environments.absolute()) as folder:
        report = measure(folder, options)
    curves = report["curves"]
    facts = {
        "command": "python -m loadtest.curves " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "commit": commit(),
    }
    written = (
        facts | report | {"curves": [asdict(curve) | {"worst": curve.worst} for curve in curves]}
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    page = document("Cost curves of Penstock", [curve.chart() for curve in curves])
    options.json.with_suffix(".html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
