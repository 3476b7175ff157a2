"""`@pytest.mark.variants(3)`: three variants of a test run each time, the others in the slow suite.

For tests with many parameters that take long together and seldom fail one by one. `FEW` has the
folders whose tests need no marker for that.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

# Each model of a folder has tests of its own, so a fault in a shared layer fails dozens of them.
FEW = {"tests/engine/models/": 2}


def mark_slow_variants(items: Iterable[pytest.Item]) -> None:
    """Mark all but a few variants of each test with the marker `variants`, or in `FEW`, as slow.

    A checksum of the name chooses them, so each parameter of a product gets several of its values.
    Variants that are slow already do not count.
    """
    tests: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("variants")
        count = marker.args[0] if marker else _count_of_folder(item.nodeid)
        if count and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0], count].append(item)
    for (_, count), variants in tests.items():
        variants.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in variants[count:]:
            item.add_marker(pytest.mark.slow)


def _count_of_folder(nodeid: str) -> int:
    """Return how many variants of a test run each time by its folder, or 0 for all of them."""
    return next((count for folder, count in FEW.items() if nodeid.startswith(folder)), 0)
