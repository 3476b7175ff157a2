"""Workloads from files: published traces of production traffic, and lists of real prompts.

Mooncake's JSON lines (FAST '25): milliseconds, lengths, and a hash for each 512 tokens of the
prompt, equal where prompts begin alike. Azure's CSV (Splitwise, ISCA '24): times and lengths. A
trace says how long texts are, not what they say: `Prose` writes them. JSON lines with a `question`
(GSM8K), `turns` (MT-bench) or `prompt` are asked as they are.
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
PROMPT_ANSWER = 128  # tokens of an answer to a real prompt


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded request: seconds, tokens, and names of its blocks."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def from_file(path: Path, scale: Scale, longest: int | None) -> Workload:
    """Raises BenchError. Of a trace, requests over `longest` tokens are left out and counted."""
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
            f"{path} is neither a trace of Mooncake or Azure nor lines of prompts: {error!r}"
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
            f"No two requests of {path} fit {longest} tokens; the median has "
            f"{sorted(e.prompt_tokens + e.output_tokens for e in scaled)[len(scaled) // 2]}. "
            "Shrink them with --length-scale."
        )
    mean = (kept[-1].at - kept[0].at) / (len(kept) - 1)

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            salt = rng.getrandbits(64)  # another text each time, or it would be in the cache
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
            yield 1.0  # from the trace's end to its beginning

    scaling = "" if scale == Scale() else f" x {scale}"
    biggest = max(e.prompt_tokens + e.output_tokens for e in kept)
    left_out = len(scaled) - len(kept)
    return Workload(f"{path.name}{scaling}", shapes, biggest, gaps if mean else None, left_out)


def _prompts(path: Path, prompts: Sequence[str]) -> Workload:
    if not prompts:
        raise BenchError(f"{path} holds no prompts.")

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            for prompt in rng.sample(prompts, len(prompts)):
                yield Shape(0, PROMPT_ANSWER, text=prompt)

    return Workload(path.name, shapes, PROMPT_ANSWER)
