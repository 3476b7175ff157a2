"""Kernels are compiled once, kept in a folder, and loaded from there without Numba."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.device.cache import UNUSED_S, cache_problem
from engine.kernels.numba import machine_code
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.machine_code import KernelStore

ROWS = ("rowwise.rows_kernel", 1, False)


def compiled_by_a_start(folder: Path | None) -> int:
    """Return how many kernels a new process would compile to get ROWS."""
    store = KernelStore(folder)
    assert store.address(*ROWS)
    assert store.address(*ROWS), "asked for again"
    return store.compiled


def test_next_start_loads_what_was_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kernels"
    assert [compiled_by_a_start(folder) for _ in range(3)] == [1, 0, 0]
    [file] = folder.iterdir()
    assert file.name.startswith("rowwise.rows_kernel_1_0_")
    assert folder.stat().st_mode & 0o77 == 0, "machine code of others must not be run"


def test_each_compilation_is_reported_before_it_starts(tmp_path: Path) -> None:
    for expected in ([("rowwise.rows_kernel", 1, 0)], []):
        reported: list[Kernel] = []
        store = KernelStore(tmp_path)
        store.compiling = reported.append
        store.address(*ROWS)
        assert reported == expected


def test_two_starts_at_once_compile_once(tmp_path: Path) -> None:
    stores = [KernelStore(tmp_path) for _ in range(2)]
    entered = threading.Event()

    def compiling(kernel: Kernel) -> None:
        entered.set()
        time.sleep(0.2)  # the other one has found no file by now

    stores[0].compiling = compiling
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stores[0].address, *ROWS)
        assert entered.wait(60)
        assert stores[1].address(*ROWS)
        assert first.result()
    assert [store.compiled for store in stores] == [1, 0]
    assert len(list(tmp_path.iterdir())) == 1, "a lock is left"


def test_start_compiles_if_another_one_stopped_while_it_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "MOST_WAIT_S", 0.1)
    store = KernelStore(tmp_path)
    with store._turn(store._file_name(*ROWS)):
        assert compiled_by_a_start(tmp_path) == 1


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("is_parent", [False, True], ids=["folder", "parent"])
@pytest.mark.variants(1)
def test_folder_that_others_can_write_is_neither_read_nor_written(
    mode: int, is_parent: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    assert compiled_by_a_start(folder) == 1
    before = sorted(folder.iterdir())
    unsafe = tmp_path if is_parent else folder
    unsafe.chmod(mode)
    assert compiled_by_a_start(folder) == 1
    assert sorted(folder.iterdir()) == before
    unsafe.chmod(0o700)
    assert compiled_by_a_start(folder) == 0


@pytest.mark.slow
def test_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_by_a_start(tmp_path) == 1
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert compiled_by_a_start(tmp_path) == 1
    assert f"not to the user {other}" in (cache_problem(tmp_path) or "")


@pytest.mark.slow
def test_file_that_others_can_write_is_compiled_again(tmp_path: Path) -> None:
    assert compiled_by_a_start(tmp_path) == 1
    [file] = tmp_path.iterdir()
    file.chmod(0o666)
    assert [compiled_by_a_start(tmp_path) for _ in range(2)] == [1, 0]
    assert file.stat().st_mode & 0o77 == 0


def test_folders_are_closed_to_others_at_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert [compiled_by_a_start(tmp_path / "new" / "kernels") for _ in range(2)] == [1, 0]
    finally:
        os.umask(before)
    for made in (tmp_path / "new", tmp_path / "new" / "kernels"):
        assert made.stat().st_mode & 0o77 == 0


def test_old_versions_are_deleted_after_no_start_has_used_them(tmp_path: Path) -> None:
    assert compiled_by_a_start(tmp_path) == 1
    [current] = tmp_path.iterdir()
    fresh, old = tmp_path / "rowwise_0123456789abcdef", tmp_path / "rowwise_fedcba9876543210"
    lock = tmp_path / ".rowwise_fedcba9876543210.lock"
    for file in (current, fresh, old, lock):
        file.touch()
    last_used = time.time() - UNUSED_S - 60
    for file in (current, old, lock):
        os.utime(file, (last_used, last_used))
    assert compiled_by_a_start(tmp_path) == 0
    assert set(tmp_path.iterdir()) == {current, fresh}
    assert current.stat().st_mtime > last_used + UNUSED_S, "a use must be noted"


@pytest.mark.parametrize("damage", ["empty", "half", "changed", "no head"])
@pytest.mark.variants(1)
def test_damaged_file_is_compiled_again(damage: str, tmp_path: Path) -> None:
    assert compiled_by_a_start(tmp_path) == 1
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
        "no head": b"[]" + whole[whole.index(b"\n") :],
    }
    file.write_bytes(damaged[damage])
    assert [compiled_by_a_start(tmp_path) for _ in range(2)] == [1, 0]


@pytest.mark.slow
def test_without_a_place_every_start_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container without a home folder, below a file, or with a full disk."""
    assert compiled_by_a_start(None) == 1
    (tmp_path / "file").touch()
    assert compiled_by_a_start(tmp_path / "file" / "kernels") == 1

    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert [compiled_by_a_start(tmp_path) for _ in range(2)] == [1, 1]


WORK = """
import sys
import torch
from engine.attention.numba import NumbaBackend
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.rowwise import activate, norm, rotate
from tests.engine.attention.test_torch import PLAIN
from tests.support.paged import PagedRun, dense, random_sequences

sequences = random_sequences(PLAIN, [20])
found = PagedRun(sequences, 16, backend=NumbaBackend(torch.device("cpu"))).whole()
assert torch.allclose(found[0].double(), dense(sequences)[0], atol=1e-5)
x = torch.randn(4, 2, 16)
right = torch.nn.functional.rms_norm(x, (16,), eps=1e-5)
assert torch.allclose(norm(x, None, None, 1e-5)[1], right, atol=1e-5)
assert activate(x, "silu", gated=True).shape == activate(x, "gelu", gated=True).shape == (4, 2, 8)
assert torch.equal(rotate(x, torch.ones(4, 1, 16), torch.zeros(4, 1, 16)), x)
if has_avx512_bf16():
    assert kernel_store().address("linear.rows_kernel", 64, True, False)
print(kernel_store().compiled, "numba" in sys.modules)
"""


@pytest.mark.slow
def test_next_process_computes_without_numba(tmp_path: Path) -> None:
    """The file's name is the same in every process, and the loaded code works."""
    count = 6 + has_avx512_bf16()
    for expected in (f"{count} True", "0 False"):
        ran = subprocess.run(
            [sys.executable, "-c", WORK],
            env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
            cwd=Path(__file__).resolve().parents[4],
            capture_output=True,
            text=True,
        )
        assert ran.stdout.strip() == expected, ran.stderr
    assert len(list((tmp_path / "penstock" / "kernels").iterdir())) == count
