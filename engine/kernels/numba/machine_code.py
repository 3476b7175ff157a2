"""The machine code of kernels: loaded from disk if it was compiled before, else compiled and kept.

Numba takes a second to import and to prepare, even for kernels that it compiled before. llvmlite
alone loads a kernel in a millisecond. So Numba is imported only to compile.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from llvmlite import binding as llvm

from engine.device.cache import (
    cache_folder,
    cache_problem,
    delete_unused,
    is_trusted,
    make_cache_folder,
    mark_used,
)
from engine.device.limits import free_memory
from engine.kernels.numba.compilers import Compilers, Kernel
from engine.kernels.numba.cpu import cpu_features, cpu_name

log = logging.getLogger(__name__)

COMPILER_BYTES = 300_000_000  # the most memory that a process takes to compile, rounded up
MOST_WAIT_S = 60.0  # for another process that compiles the same kernel; it takes a few seconds


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel, as an object file."""

    symbol: str  # the name of the kernel's function
    unneeded: list[str]  # functions of Numba's runtime that only a failing kernel would call
    code: bytes


class KernelStore:
    """The kernels of this process by name and shape, and the folder that keeps their code."""

    def __init__(self, folder: Path | None) -> None:
        """Without a `folder`, every process compiles; also if others could change its files."""
        # Called before a kernel compiles.
        self.compiling: Callable[[Kernel], None] = lambda kernel: None
        # Called again and again while a kernel is compiled ahead.
        self.waiting: Callable[[], None] = lambda: None
        self.compiled = 0  # kernels that this process compiled, since they were not in the folder
        self.compile_seconds = 0.0
        self.wait_seconds = 0.0  # for kernels that other processes compile ahead
        self._folder = folder
        if folder is not None:
            if cache_problem(folder.parent, folder) is None:
                delete_unused(folder, lambda name: name.endswith(_digest()))
            else:
                self._folder = None
        self._compilers: Compilers | None = None
        self._engine: llvm.ExecutionEngine | None = None
        self._addresses: dict[Kernel, int] = {}

    def check(self) -> None:
        """Raises ImportError if kernels cannot be compiled here, and none was compiled before."""
        if self._folder is None:
            importlib.import_module("numba")
        elif not next(self._folder.glob(f"*{_digest()}"), None):
            if find_spec("numba") is None:
                raise ModuleNotFoundError("No module named 'numba'", name="numba")
            compilers = Compilers(self._folder)
            try:
                compilers.check()
            except OSError:  # no more processes may be started
                importlib.import_module("numba")
            else:
                self._compilers = compilers

    def compile_ahead(self, kernels: Sequence[Kernel], processes: int) -> int:
        """Let up to `processes` other processes compile missing kernels, the first ones first.

        Returns how many do. Without a folder, or if no process can be started, none does: `address`
        compiles when it is called.
        """
        count = min(processes, len(kernels), free_memory() // COMPILER_BYTES)
        if self._folder is None or count == 0:
            self._compilers = None
            return 0
        if self._compilers is None or self._compilers.kernels:  # those have another model's list
            self._compilers = Compilers(self._folder)
        try:
            self._compilers.compile(kernels, count)
        except OSError:
            self._compilers = None
            return 0
        return count

    def compile_if_free(self, name: str, *shape: int) -> None:
        """Compile a kernel into the folder, unless it is there or another process compiles it."""
        file_name = self._file_name(name, *shape)
        with self._turn(file_name, waits=False) as is_locked:
            if is_locked and self._read(file_name) is None:
                self._write(file_name, self._compile(name, shape))

    def address(self, name: str, *shape: int) -> int:
        """Return the address of a kernel: `name` is "module.function" of `source/`."""
        known = self._addresses.get((name, *shape))
        if known is None:
            known = self._load(self._find(name, shape))
            self._addresses[name, *shape] = known
        return known

    def has(self, kernel: Kernel) -> bool:
        """Whether a kernel need not be compiled, unless its file is damaged."""
        if kernel in self._addresses:
            return True
        name, *shape = kernel
        return self._folder is not None and (self._folder / self._file_name(name, *shape)).exists()

    def _find(self, name: str, shape: tuple[int, ...]) -> MachineCode:
        file_name = self._file_name(name, *shape)
        code = self._read(file_name) or self._compiled_ahead(name, shape)
        if code is None:
            with self._turn(file_name):
                code = self._read(file_name)  # another process may have compiled it meanwhile
                if code is None:
                    code = self._compile(name, shape)
                    self._write(file_name, code)
        return code

    def _compiled_ahead(self, name: str, shape: tuple[int, ...]) -> MachineCode | None:
        """Wait for a kernel that is compiled ahead; return None if it is not."""
        compilers = self._compilers
        kernel: Kernel = (name, *map(int, shape))
        if compilers is None or kernel not in compilers.kernels:
            return None
        begin = time.monotonic()
        while not self.has(kernel) and time.monotonic() < begin + MOST_WAIT_S and compilers.wait():
            self.waiting()
        self.wait_seconds += time.monotonic() - begin
        return self._read(self._file_name(name, *shape))

    @staticmethod
    def _file_name(name: str | int, *shape: str | int) -> str:
        return "_".join([str(name), *map(str, map(int, shape)), _digest()])

    @contextlib.contextmanager
    def _turn(self, file_name: str, *, waits: bool = True) -> Iterator[bool]:
        """Wait while another process compiles this kernel, as ranks do that start together.

        Yields whether the kernel is locked now. If not `waits`, another process may have it.
        """
        is_locked = False
        with contextlib.ExitStack() as stack:
            if self._folder is not None:
                with contextlib.suppress(OSError):  # without a place for files, all compile
                    make_cache_folder(self._folder)
                    lock = self._folder / f".{file_name}.lock"
                    file = stack.enter_context(lock.open("a"))
                    is_locked = _lock(file, MOST_WAIT_S if waits else 0.0)
                    if is_locked or waits:
                        stack.callback(lock.unlink, missing_ok=True)
            yield is_locked

    def _compile(self, name: str, shape: tuple[int, ...]) -> MachineCode:
        self.compiling((name, *map(int, shape)))
        from engine.kernels.numba.compile import compile_kernel

        begin = time.monotonic()
        code = compile_kernel(name, shape)
        self.compiled += 1
        self.compile_seconds += time.monotonic() - begin
        return code

    def _read(self, file_name: str) -> MachineCode | None:
        """Return the code in a file, or None if there is no file or a broken one."""
        if self._folder is None:
            return None
        path = self._folder / file_name
        try:
            with path.open("rb") as file:
                if not is_trusted(os.fstat(file.fileno())):
                    return None
                head, _, code = file.read().partition(b"\n")
            facts = json.loads(head)
            if facts["sha256"] != hashlib.sha256(code).hexdigest():
                return None
            mark_used(path)
            return MachineCode(facts["symbol"], facts["unneeded"], code)
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _write(self, file_name: str, code: MachineCode) -> None:
        """Keep the code, if there is a place for it. A reader never sees a part of the file."""
        if self._folder is None:
            return
        facts = {
            "sha256": hashlib.sha256(code.code).hexdigest(),
            "symbol": code.symbol,
            "unneeded": code.unneeded,
        }
        own = self._folder / f".{file_name}.{os.getpid()}"
        try:
            own.touch(0o600)  # regardless of the umask: a file that others may write is not loaded
            own.write_bytes(json.dumps(facts).encode() + b"\n" + code.code)
            own.replace(self._folder / file_name)
        except OSError as error:
            log.debug("cannot keep the kernel %s: %s", file_name, error)
            with contextlib.suppress(OSError):
                own.unlink()

    def _load(self, code: MachineCode) -> int:
        abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
        for name in code.unneeded:
            if not llvm.address_of_symbol(name):
                llvm.add_symbol(name, abort)
        if self._engine is None:
            self._engine = _empty_engine()
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code.code))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(code.symbol))


def _lock(file: IO[str], most_wait_s: float) -> bool:
    """Lock a file until it is closed. False: its owner had it all the time, and may be stopped."""
    deadline = time.monotonic() + most_wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


@cache
def kernel_store() -> KernelStore:
    """Return the store of this process. Its folder is the user's cache folder."""
    return KernelStore(cache_folder("kernels"))


def _empty_engine() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


@cache
def _digest() -> str:
    """Return a digest of all that the machine code depends on: source, compiler and CPU."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    target = f"{version('numba')} {version('llvmlite')} {cpu_name()} {cpu_features()}"
    found.update(target.encode())
    return found.hexdigest()[:16]
