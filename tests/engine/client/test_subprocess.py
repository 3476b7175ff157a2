"""Environment and module path of the engine process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.client.subprocess import PRIMITIVE_CACHES, _engine_environment
from tests.support.process import ROOT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": ""}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_engine_environment_sets_huge_pages_unless_given(
    before: dict[str, str], after: str
) -> None:
    environment = _engine_environment({"PATH": "/bin"} | before)
    assert environment == {"PATH": "/bin", "GLIBC_TUNABLES": after} | PRIMITIVE_CACHES


def test_engine_environment_given_kernel_cache_size_is_kept() -> None:
    environment = _engine_environment({"LRU_CACHE_CAPACITY": "7"})
    assert environment == _engine_environment({}) | {"LRU_CACHE_CAPACITY": "7"}


@pytest.mark.parametrize(
    ("arguments", "sign"),
    [
        (["--plan"], "KV blocks of"),
        pytest.param(["--threads", "1"], "serves demo", marks=pytest.mark.slow),
    ],
)
def test_serve_in_folder_with_python_modules_runs_none_of_them(
    tmp_path: Path, arguments: list[str], sign: str
) -> None:
    for name in ("engine.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('a stranger was run')")
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "server", "serve", "--port", "0", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with server:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if sign in line:
                break
        server.terminate()
    assert sign in "".join(said)[-400:], said
