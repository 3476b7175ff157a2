"""Run a target for some time: mutate, check, and keep an input that fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.target import MAX_SECONDS, Target

CASES = Path(__file__).parent / "cases"
JOURNALS = Path(__file__).parents[2] / "build" / "fuzz"
MAX_INPUT = 1 << 20  # bytes
LENGTH = 8  # bytes of its length in a journal
MAX_POOLED = 20_000  # bytes of an input that is mutated again


@dataclass
class Tally:
    """The work of a run."""

    inputs: int = 0
    seconds: float = 0.0


def kept_cases(target: Target) -> list[bytes]:
    """Return the inputs that failed once."""
    return [file.read_bytes() for file in sorted((CASES / target.name).glob("*.bin"))]


def keep(target: Target, data: bytes) -> Path:
    """Store an input that fails; later runs try it first."""
    file = CASES / target.name / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


@contextlib.contextmanager
def journal(target: Target, *, store: bool) -> Iterator[mmap.mmap]:
    """A file with the input that is being checked, its length first; 0 between the inputs.

    It survives the end of this process. The input that a process died of becomes a case.
    """
    JOURNALS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() if not store else (JOURNALS / target.name).open("a+b") as file:
        file.truncate(MAX_INPUT + LENGTH)
        with mmap.mmap(file.fileno(), 0) as pages:
            if length := int.from_bytes(pages[:LENGTH], "little"):
                keep(target, pages[LENGTH : LENGTH + length])
            yield pages


async def fuzz(
    target: Target, seconds: float, seed: int, *, store: bool = True, least: int = 0
) -> Tally:
    """Check the kept cases, then seeds and mutated inputs for `seconds`, at least `least` inputs.

    Raises the failure of the first input that fails, after storing the input if `store`.
    """
    random = Random(seed)
    tally = Tally()
    pool = target.seeds()
    with journal(target, store=store) as checked, tempfile.TemporaryDirectory() as folder:
        first = kept_cases(target)
        num_kept = len(first)
        began = time.monotonic()
        async with target.opened(Path(folder)) as check:
            while first or tally.inputs < least or time.monotonic() - began < seconds:
                data = first.pop(0) if first else random.choice(pool)
                if tally.inputs >= num_kept and random.random() < 0.95:
                    data = target.mutate(random, data)
                checked[: LENGTH + len(data)] = len(data).to_bytes(LENGTH, "little") + data
                try:
                    started = time.monotonic()
                    async with asyncio.timeout(MAX_SECONDS):
                        await check(data)
                    took = time.monotonic() - started  # also of a check that never waits
                    assert took < MAX_SECONDS, f"took {took:.0f} s"
                except BaseException as error:
                    where = keep(target, data) if store else "not stored"
                    error.add_note(f"{target.name}, seed {seed}: {where}: {data[:300]!r}")
                    raise
                finally:
                    checked[:LENGTH] = bytes(LENGTH)
                tally.inputs += 1
                if len(data) < MAX_POOLED and random.random() < 0.02:
                    pool.append(data)
                    pool = pool[-300:]
    tally.seconds = time.monotonic() - began
    return tally
