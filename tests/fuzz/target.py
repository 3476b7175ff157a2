"""A target of the fuzzer: a kind of input, and the check that must hold for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random

Check = Callable[[bytes], Awaitable[None]]
Mutate = Callable[[Random, bytes], bytes]
MAX_SECONDS = 20  # of one input, on a busy machine


@dataclass(frozen=True)
class Target:
    """A way into Penstock. `opened` gives the check, which raises if something is wrong.

    A short test tries `least` inputs, also on a busy machine.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    mutate: Mutate
    opened: Callable[[Path], AbstractAsyncContextManager[Check]]
    least: int = 25
