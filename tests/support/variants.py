"""`@pytest.mark.variants(3)`: three variants of a test run each time, the others in the slow suite.

For tests with many parameters that take long together and seldom fail one by one.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_slow_variants(items: Iterable[pytest.Item]) -> None:
    """Mark all but a few variants of each test with the marker `variants` as slow.

    A checksum of the name chooses them, so each parameter of a product gets several of its values.
    Variants that are slow already do not count.
    """
    tests: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("variants")
        if marker is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            tests[test, marker.args[0]].append(item)
    for (_, count), variants in tests.items():
        variants.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in variants[count:]:
            item.add_marker(pytest.mark.slow)
