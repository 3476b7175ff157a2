"""Workloads from files: published traces of production traffic, and lists of real prompts.

- Mooncake's JSON lines (FAST '25) have times in milliseconds, lengths, and a hash for each 512
  tokens of the prompt. Prompts with a common prefix begin with the same hashes.
- Azure's CSV (Splitwise, ISCA '24) has times and lengths.
- JSON lines with a `question` (GSM8K), `turns` (MT-bench) or `prompt` are sent unchanged.

A trace has the lengths of texts but not the texts; `Prose` generates them.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.errors import BenchError
from loadtest.workload import Scale, Shape, Workload

MOONCAKE_BLOCK = 512  # tokens under one hash
PROMPT_ANSWER = 128  # output tokens for a real prompt


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded request: its time in seconds, its lengths, and the hashes of its blocks."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def from_file(path: Path, scale: Scale, longest: int | None) -> Workload:
    """Read a workload. Requests of a trace over `longest` tokens are left out and counted.

    Raises BenchError if the file has another format or no request fits.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            first = lines.readline()
            lines.seek(0)
            if "ContextTokens" in first:
                return _trace(path, [_azure(row) for row in csv.DictReader(lines)], scale, longest)
            rows = [json.loads(line) for line in lines if line.strip()]
            if rows and "hash_ids" in rows[0]:
                return _trace(path, [_mooncake(row) for row in rows], scale, longest)
            return _prompts(path, [_prompt(row) for row in rows])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BenchError(
            f"{path} is neither a trace of Mooncake or Azure nor JSON lines of prompts: {error!r}"
        ) from None


def _azure(row: dict[str, str]) -> Entry:
    at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return Entry(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(row: dict[str, Any]) -> Entry:
    blocks = tuple(map(int, row["hash_ids"]))
    return Entry(
        row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), blocks
    )


def _prompt(row: dict[str, Any]) -> str:
    return str(row["turns"][0] if "turns" in row else row.get("question") or row["prompt"])


def _trace(path: Path, entries: Sequence[Entry], scale: Scale, longest: int | None) -> Workload:
    scaled = [
        Entry(
            entry.at,
            max(1, round(entry.prompt_tokens * scale.prompt)),
            max(1, round(entry.output_tokens * scale.output)),
            entry.blocks,
        )
        for entry in sorted(entries, key=lambda entry: entry.at)
    ]
    kept = [e for e in scaled if longest is None or e.prompt_tokens + e.output_tokens <= longest]
    if len(kept) < 2:
        raise BenchError(
            f"Fewer than two requests of {path} fit in {longest} tokens; the median request has "
            f"{sorted(e.prompt_tokens + e.output_tokens for e in scaled)[len(scaled) // 2]}. "
            "Reduce the lengths with --length-scale."
        )
    mean = (kept[-1].at - kept[0].at) / (len(kept) - 1)

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            salt = rng.getrandbits(64)  # different texts each time, so that no cache has them
            for entry in kept:
                yield Shape(
                    entry.prompt_tokens,
                    entry.output_tokens,
                    tuple(f"{salt} {block}" for block in entry.blocks),
                    MOONCAKE_BLOCK * scale.prompt,
                )

    def gaps() -> Iterator[float]:
        yield 0.0
        while True:
            for before, after in itertools.pairwise(kept):
                yield (after.at - before.at) / mean
            yield 1.0  # from the end of the trace back to its start

    scaling = "" if scale == Scale() else f" x {scale}"
    biggest = max(e.prompt_tokens + e.output_tokens for e in kept)
    left_out = len(scaled) - len(kept)
    return Workload(f"{path.name}{scaling}", shapes, biggest, gaps if mean else None, left_out)


def _prompts(path: Path, prompts: Sequence[str]) -> Workload:
    if not prompts:
        raise BenchError(f"{path} contains no prompts.")

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            for prompt in rng.sample(prompts, len(prompts)):
                yield Shape(0, PROMPT_ANSWER, text=prompt)

    return Workload(path.name, shapes, PROMPT_ANSWER)
