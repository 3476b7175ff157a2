"""How much of the random tests runs: a share in `make test`, all of it in `make test-slow`."""

from __future__ import annotations

import os

THOROUGH = "TEST_THOROUGH"  # the environment variable that `make test-slow` sets
SHARE = 5
FEWEST = 30


def is_thorough() -> bool:
    return bool(os.environ.get(THOROUGH))


def examples(count: int) -> int:
    """Return how many of `count` random examples a property test tries in this run."""
    return count if is_thorough() else max(FEWEST, count // SHARE)
