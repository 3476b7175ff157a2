"""Kernels are compiled ahead by other processes, each one once, and this process needs no Numba."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.kernels.numba import compilers, machine_code
from engine.kernels.numba.compilers import Compilers, Kernel
from engine.kernels.numba.machine_code import KernelStore

KERNELS: list[Kernel] = [("rowwise.rows_kernel", 1, 0), ("program.program_kernel",)]

AHEAD = """
import json, sys
from pathlib import Path
from engine.kernels.numba.machine_code import KernelStore

store = KernelStore(Path(sys.argv[1]))
store.check()
kernels = [tuple(kernel) for kernel in json.loads(sys.argv[2])]
processes = store.compile_ahead(kernels, 2)
told = []
store.waiting = lambda: told.append(1)
addresses = [store.address(*kernel) for kernel in kernels]
while store._compilers.wait():  # the last lock is deleted after the kernel is there
    pass
here = [store.compiled, "numba" in sys.modules]
print(json.dumps([processes, all(addresses), len(told) > 0, *here]))
"""


def run_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the processes that compile run this program instead."""
    monkeypatch.setattr(compilers, "python_module", lambda name: [sys.executable, "-c", program])


def test_first_start_compiles_in_other_processes_and_does_not_import_numba(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    ran = subprocess.run(
        [sys.executable, "-c", AHEAD, str(folder), json.dumps(KERNELS)],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(ran.stdout) == [2, True, True, 0, False]
    names = sorted(file.name.rpartition("_")[0] for file in folder.iterdir())
    assert names == ["program.program_kernel", "rowwise.rows_kernel_1_0"], "a lock is left"


def test_two_processes_with_the_same_list_compile_each_kernel_once(tmp_path: Path) -> None:
    stores = [KernelStore(tmp_path) for _ in range(2)]

    def compile_all(store: KernelStore) -> None:
        for name, *shape in KERNELS:
            store.compile_if_free(str(name), *map(int, shape))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_all, stores))
    assert sum(store.compiled for store in stores) == len(KERNELS)
    for store in stores:
        compile_all(store)
    assert sum(store.compiled for store in stores) == len(KERNELS), "they were there"


def test_kernel_that_another_process_compiles_is_left_to_it(tmp_path: Path) -> None:
    name, *shape = KERNELS[0]
    store = KernelStore(tmp_path)
    with KernelStore(tmp_path)._turn(store._file_name(name, *shape)) as is_locked:
        assert is_locked
        store.compile_if_free(str(name), *map(int, shape))
    assert store.compiled == 0
    assert not list(tmp_path.iterdir()), "the lock is its owner's"


@pytest.mark.parametrize(
    "program",
    ["print('ready')", "import os; print('ready', flush=True); os.kill(os.getpid(), 9)", ""],
    ids=["compiles nothing", "is killed", "ends at once"],
)
def test_kernel_that_no_process_compiled_is_compiled_here(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program(monkeypatch, program)
    store = KernelStore(tmp_path)
    assert store.compile_ahead(KERNELS, 2) == 2
    name, *shape = KERNELS[1]
    assert store.address(str(name), *map(int, shape))
    assert store.compiled == 1


def test_numba_that_cannot_be_imported_is_an_import_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program(monkeypatch, "print('Numba needs NumPy 1.0 or less')")
    with pytest.raises(ImportError, match=r"Numba needs NumPy 1\.0 or less"):
        KernelStore(tmp_path).check()
    run_program(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(ImportError, match="the process that imports Numba ended"):
        KernelStore(tmp_path).check()


def test_no_process_compiles_without_a_folder_or_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program(monkeypatch, "raise AssertionError")
    assert KernelStore(None).compile_ahead(KERNELS, 2) == 0
    assert KernelStore(tmp_path).compile_ahead([], 2) == 0
    monkeypatch.setattr(machine_code, "free_memory", lambda: machine_code.COMPILER_BYTES - 1)
    assert KernelStore(tmp_path).compile_ahead(KERNELS, 2) == 0
    monkeypatch.setattr(machine_code, "free_memory", lambda: machine_code.COMPILER_BYTES)
    assert KernelStore(tmp_path).compile_ahead(KERNELS, 2) == 1


def test_start_without_a_right_to_more_processes_compiles_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **facts: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(compilers.subprocess, "Popen", refused)
    store = KernelStore(tmp_path)
    store.check()
    assert store.compile_ahead(KERNELS, 2) == 0
    name, *shape = KERNELS[1]
    assert store.address(str(name), *map(int, shape))
    assert store.compiled == 1


def test_second_model_of_a_process_has_a_list_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program(monkeypatch, "import sys; print('ready'); sys.stdin.readline()")
    store = KernelStore(tmp_path)
    for kernel in KERNELS:
        assert store.compile_ahead([kernel], 2) == 1
        assert store._compilers is not None
        assert store._compilers.kernels == {kernel}


def test_processes_end_with_the_object_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program(monkeypatch, "import time; print('ready', flush=True); time.sleep(600)")
    waiting = Compilers(tmp_path)
    waiting.check()
    assert waiting.wait(), "it runs"
    [process] = waiting._processes
    del waiting
    assert process.poll() == -9
