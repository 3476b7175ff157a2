"""`make bench-peers`: Penstock against other model servers on this CPU.

All contenders get the same model in bfloat16, the same prompts as token ids, and answers of the
same length, greedy and without EOS. One runs at a time, in a fresh process for each measurement.
Their rounds alternate, so that changes in the machine's speed affect all of them. Medians are
printed. A contender that cannot be installed or started becomes a line with the reason.

mistral.rs and OpenVINO GenAI run in a process without HTTP, which favours them. mistral.rs takes no
token ids: it gets the same prompts as text, as a message of a chat. OpenVINO reads no bfloat16 from
GGUF: its file has the weights in float16, and it computes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from loadtest.bench_cpu import bound, matmul_rate, read_rate
from loadtest.charts import Dot, Line, chart, document
from loadtest.contenders import Load
from loadtest.gguf_model import write_gguf
from loadtest.peers import contenders
from loadtest.peers.contenders import Contender, Figures, Job, Worker
from loadtest.peers.environments import VERSIONS, InstallError, environment
from loadtest.random_model import LLAMA_1B, LLAMA_125M, write_random_llama
from loadtest.workload import poisson

SHAPES: dict[str, Mapping[str, object]] = {"125m": LLAMA_125M, "1.1b": LLAMA_1B}
PEERS = ["llama.cpp", "vllm", "mistral.rs", "openvino"]
OURS = "penstock"


class Closed(NamedTuple):
    """A closed loop: each stream sends its requests one after the other."""

    streams: int
    prompt: int  # tokens
    new: int  # tokens
    each: int  # requests of each stream
    shared: int = 0  # tokens at the start of all prompts that are equal


CLOSED = {
    "1 stream": Closed(1, 128, 64, 4),
    "8 streams": Closed(8, 128, 64, 2),
    "32 streams": Closed(32, 128, 64, 2),
    "8 streams, 1700 in": Closed(8, 1700, 128, 1),
    "1050 in": Closed(1, 1050, 16, 5),
    "1050 in, 1000 shared": Closed(1, 1050, 16, 5, 1000),
}
ARRIVING = "arriving"  # requests arrive at random, at SHARE of vLLM's rate with 32 streams
SHARE, ARRIVING_S = 0.7, 60.0
Results = dict[str, dict[str, list[Figures]]]  # workload -> contender -> a round's figures


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, 32000, (count, length), generator=generator).tolist()


def job(workload: str, seed: int, rate: float | None) -> Job | None:
    """Return the requests of a round; None if requests should arrive and no rate is known."""
    if workload in CLOSED:
        streams, prompt, new, each, shared = CLOSED[workload]
        [common] = prompts(1, shared, -seed)
        own = prompts(streams * each, prompt - shared, seed)
        return Job([common + rest for rest in own], new, streams)
    if rate is None:
        return None
    _, prompt, new, *_ = CLOSED["32 streams"]
    at, arrivals, gaps = 0.0, list[float](), poisson(random.Random(seed))
    while (at := at + next(gaps) / rate) < ARRIVING_S:
        arrivals.append(at)
    return Job(prompts(len(arrivals), prompt, seed), new, 32, tuple(arrivals))


def make_contenders(
    names: Sequence[str], folder: Path, root: Path
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders, and for each peer that cannot take part the reason."""
    found: dict[str, Contender] = {OURS: contenders.penstock(folder)}
    failed: dict[str, str] = {}
    gguf = folder / "model.gguf"
    write_gguf(folder, gguf, torch.bfloat16)
    if "openvino" in names:  # it reads no bf16 from GGUF
        write_gguf(folder, half := folder / "half.gguf", torch.float16)
    texts = Tokenizer.from_file(str(folder / "tokenizer.json"))
    make: dict[str, Callable[[Path], Contender]] = {
        "llama.cpp": lambda home: contenders.llama_cpp(home, gguf),
        "vllm": lambda home: contenders.vllm(home, folder),
        "mistral.rs": lambda home: Worker(home, "worker_mistralrs.py", folder, texts),
        "openvino": lambda home: Worker(home, "worker_openvino.py", half, None),
    }
    for name in names:
        try:
            found[name] = make[name](environment(name, root))
        except (InstallError, OSError) as error:
            failed[name] = f"not installed: {error}"
    return found, failed


def measure(
    made: Mapping[str, Contender], workloads: Sequence[str], rounds: int, failed: dict[str, str]
) -> Results:
    """Alternate the contenders' rounds. One that fails sits out the workload's later rounds."""
    results: Results = {workload: {} for workload in workloads}
    for number in range(rounds):
        for workload in workloads:
            fastest = results.get("32 streams", {}).get("vllm")
            rate = SHARE * fastest[-1].rate / CLOSED["32 streams"].new if fastest else None
            this = job(workload, number + 1, rate)
            for name, contender in made.items():
                key = f"{name}, {workload}"
                if key in failed:
                    continue
                try:
                    if this is None:
                        raise RuntimeError("vLLM's rate with 32 streams is not known")
                    found = contender.measure(this)
                    results[workload].setdefault(name, []).append(found)
                    print(f"round {number + 1}, {key}: {found}", flush=True)
                except Exception as error:
                    failed[key] = str(error)[-300:] or type(error).__name__
                    print(f"{key} FAILED: {failed[key]}", flush=True)
    return results


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""
    columns = zip(*rounds, strict=True)
    return Figures(*(None if None in c else statistics.median(c) for c in columns))  # type: ignore[arg-type]


def table(results: Results, limits: Mapping[str, float]) -> str:
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
            cells = [workload, name, f"{one.rate:.0f}", times, gap, first, share, start, held]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(results: Results) -> str:
    """Return a page with tokens/s against the streams of the short prompts."""
    lines: dict[str, list[Dot]] = {}
    for workload, found in results.items():
        if workload in CLOSED and CLOSED[workload].prompt == 128:
            for name, rounds in found.items():
                rate = medians(rounds).rate
                dot = Dot(CLOSED[workload].streams, rate, f"{name}: {rate:.0f} tokens/s")
                lines.setdefault(name, []).append(dot)
    drawn = [Line(name, dots) for name, dots in lines.items()]
    return document("Penstock and its peers", [chart("Output", "tokens/s", "streams", drawn)])


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


def write(path: Path, report: dict[str, Any], results: Results) -> None:
    """Write the report as JSON, and its chart as a page of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {w: {n: [r._asdict() for r in rs] for n, rs in f.items()} for w, f in results.items()}
    path.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(picture(results), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="125m", help="125m or 1.1b with random weights, or a folder of a Llama"
    )
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    workloads = [*CLOSED, ARRIVING]
    parser.add_argument("--workloads", nargs="+", default=workloads, choices=workloads)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=Path("build/bench-peers.json"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as name:
        folder = Path(name) / "model"
        if options.model in SHAPES:
            write_random_llama(folder, dict(SHAPES[options.model]))
        else:
            link_model(Path(options.model).resolve(), folder)
        config = json.loads((folder / "config.json").read_text())
        rates = matmul_rate(torch.bfloat16), read_rate()
        made, failed = make_contenders(options.peers, folder, options.environments.absolute())
        results = measure(made, options.workloads, options.rounds, failed)
    limits = {}
    for workload in (w for w in options.workloads if w in CLOSED and not CLOSED[w].shared):
        streams, prompt, new, *_ = CLOSED[workload]
        limits[workload] = bound(Load(prompt, new), streams, *rates, 2, config)
    print(f"\n{table(results, limits)}\n")
    for which, why in failed.items():
        print(f"FAILED {which}: {why}")
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "command": "python -m loadtest.bench_peers " + " ".join(sys.argv[1:]),
        "versions": {"torch": torch.__version__} | {n: VERSIONS[n] for n in options.peers},
        "in_process": [n for n, contender in made.items() if not contender.http],
        "gflops": rates[0],
        "gbytes": rates[1],
        "bounds": limits,
        "failed": failed,
    }
    write(options.json, report, results)


if __name__ == "__main__":
    main()
