"""With what environment the engine process is started."""

from __future__ import annotations

import pytest

from engine.child import _with_huge_pages


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": ""}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_engine_gets_huge_pages_unless_told_otherwise(
    before: dict[str, str], after: str
) -> None:
    assert _with_huge_pages({"PATH": "/bin"} | before) == {"PATH": "/bin", "GLIBC_TUNABLES": after}
