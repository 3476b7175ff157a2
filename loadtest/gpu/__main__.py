"""`make gpu-check`, second half: compare the GPU engine's figures with the bounds of the chip.

Each section runs in a separate process and has a time limit. A section that fails or times out
becomes a line of the table. --json writes the figures after each section, so that a run that is
stopped keeps what it measured. The table is printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from engine.kernels.triton.chips import chip_of
from loadtest.gpu.bench import Row
from loadtest.gpu.report import chip_lines, line, stop_rules, table, write_json
from loadtest.gpu.sections import GROUPS, SECTIONS

BUDGET_SECONDS = 540.0  # nine minutes


def run_section(name: str, flags: list[str], seconds: float) -> tuple[list[Row], str]:
    """Run one section and return (its rows, the error or "")."""
    command = [sys.executable, "-m", "loadtest.gpu.sections", name, *flags]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if "--smoke" in flags else {})
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    ) as section:
        try:
            out, err = section.communicate(timeout=seconds)
        except BaseException as error:
            # Kill the group: it includes servers that the section started, which get no Ctrl-C.
            os.killpg(section.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return [], f"timed out after {seconds:.0f} s"
            raise
    if section.returncode:
        print(err[-4000:], file=sys.stderr)
        return [], (err.strip().splitlines() or [f"exit {section.returncode}"])[-1][:160]
    return [Row(**row) for row in json.loads(out.splitlines()[-1])], ""


def facts(command: str) -> dict[str, Any]:
    """Return the hardware and software versions of the measurement."""
    commit, describe = "", ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # a machine without git must not lose its figures
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit.strip() or "unknown",
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", choices=GROUPS, default="check")
    parser.add_argument("--sections", help="comma-separated, instead of a group")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--profile", type=Path, help="write the last decode trace to this file")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="total seconds")
    parser.add_argument(
        "--smoke", action="store_true", help="only check that it runs, with small models on a CPU"
    )
    options = parser.parse_args()
    names = options.sections.split(",") if options.sections else GROUPS[options.group]
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}; available: {', '.join(SECTIONS)}")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; use --smoke to run small models on the CPU")
    began = time.monotonic()
    flags = ["--smoke"] if options.smoke else []
    if options.profile:
        flags += ["--profile", str(options.profile)]
    said = facts(" ".join(["python -m loadtest.gpu", *sys.argv[1:]]))
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name in ["ceilings", *(n for n in names if n != "ceilings")]:
        left = options.budget - (time.monotonic() - began)
        found: list[Row] = []
        why = "no time left"
        if left >= 5:
            found, why = run_section(name, flags, min(left, SECTIONS[name].seconds))
        rows += found
        if why:
            failed[name] = why
        if name == "ceilings" and found:
            read, matmul = (row.value * 1e12 for row in found)
            flags += ["--read", str(read), "--matmul", str(matmul)]
        if options.json:
            write_json(options.json, said, rows, failed)
        # Print each section at once, so that a run that is stopped early shows its results.
        done = f"{name}: {why or 'done'} after {time.monotonic() - began:.0f} s"
        print("\n".join([done, *map(line, found)]), flush=True)
    print(f"\n{said['gpu']}, torch {said['torch']}, commit {said['commit']}, {said['date']}\n")
    print(table(rows, failed))
    chip = chip_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    for text in (*stop_rules(rows), *chip_lines(rows, chip, options.json)):
        print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
