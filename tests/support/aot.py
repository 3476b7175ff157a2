"""Compile, without a GPU, exactly the kernels that launchers would launch on one.

    python -m tests.support.aot MODULE FUNCTION

calls FUNCTION of MODULE, which calls launchers on meta tensors and yields a name for each round.
Every specialisation is compiled once for each compute capability in LIMITS. A line of JSON reports
the resources that the assembler found for it. Triton's interpreter must be off in this process, so
tests start it with `compile_ahead`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.kernels.triton.chips import CHIPS, PLAIN, features_of
from engine.kernels.triton.overlap import overlap_of
from tests.support.ptx import atomics, count_waits, first_events

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
# Bytes of a thread in local memory: with attention sinks, ptxas keeps two registers there.
STACK = 8
LIMITS = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory that a program may use
# Of one SM, in both chips (CUDA programming guide, table "Technical specifications per compute
# capability"). A program also takes RESERVED bytes of shared memory.
SM_REGISTERS, SM_THREADS, SM_PROGRAMS, RESERVED = 65536, 2048, 32, 1024
# Loads in PTX: into shared memory behind the program's back, and into registers.
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+)(?:, \S+)?;")
LOAD = re.compile(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+) ")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that determines its machine code."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # arguments known to be multiples of 16
    options: tuple[tuple[str, int], ...]

    def source(self, arch: int) -> ASTSource:
        attributes = {(i,): [["tt.divisibility", 16]] for i in self.aligned}
        constants = dict(self.constants)
        if "OVERLAP" in constants:  # launchers set it for the chip of the device
            constants["OVERLAP"] = overlap_on(arch)
        return ASTSource(self.kernel, dict(self.signature), constants, attributes)


@dataclass(frozen=True)
class Report:
    """The resources of one compiled kernel."""

    kernel: str
    arch: int
    registers: int  # per thread
    local: int  # bytes of local memory per thread: spilled registers
    shared: int  # bytes of shared memory per program
    threads: int  # per program
    loads: int  # bytes that a program loads if it runs each load of its code once
    rounds: bool  # whether it rounds fp32 to the 10 bits of TF32, which tl.dot does by default
    used_by: str
    events: list[str] = field(default_factory=list)  # of the entry block: see first_events
    waits: int = 0  # for the kernel before
    atomics: list[str] = field(default_factory=list)

    @property
    def before_wait(self) -> list[str] | None:
        """The events before the wait for the kernel before; None without one in the entry block."""
        return self.events[: self.events.index("wait")] if "wait" in self.events else None

    @property
    def programs(self) -> int:
        """Programs that an SM holds at once."""
        registers = -(-self.registers // 8) * 8 * self.threads
        by_memory = (LIMITS[self.arch] + RESERVED) // (self.shared + RESERVED)
        return min(SM_REGISTERS // registers, by_memory, SM_THREADS // self.threads, SM_PROGRAMS)

    @property
    def in_flight(self) -> int:
        """Estimate of the bytes that an SM can have under way from memory.

        Each load of each program's code is counted once: those of a pipelined loop are then all its
        stages, and those of other loops one iteration.
        """
        return self.programs * self.loads


def overlap_on(arch: int) -> int:
    """Return the constant OVERLAP of chips of this capability; forced features count from 9.0 on.

    Older chips have no programmatic dependent launch.
    """
    if arch < 90:
        return overlap_of(PLAIN)
    forced = features_of(torch.device("meta"))
    of_chips = [f for chip, f in CHIPS.items() if chip.capability == divmod(arch, 10)]
    return max(overlap_of(features) for features in (forced, *of_chips))


def specialised(kernel: JITFunction, args: Any, options: dict[str, Any]) -> Launch:
    """Return the launch as Triton's own dispatcher would specialise it."""
    own = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **own).arguments
    signature, constants, aligned = {}, {}, []
    for number, parameter in enumerate(kernel.params):
        value, fixed = bound[parameter.name], parameter.do_not_specialize
        divisible = False
        one = isinstance(value, int) and value == 1
        if parameter.is_constexpr or value is None or (one and not fixed):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            # Allocations are aligned. For arguments that may be slices, kernels declare
            # do_not_specialize.
            signature[parameter.name], divisible = f"*{TYPES[value.dtype]}", True
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            divisible = value % 16 == 0
        else:
            signature[parameter.name] = "fp32"
        if divisible and not fixed:
            aligned.append(number)
    rest = tuple(sorted((name, options[name]) for name in options if name not in own))
    items = tuple(signature.items()), tuple(constants.items())
    return Launch(kernel, *items, tuple(aligned), rest)


def record(rounds: Callable[[], Iterable[str]]) -> dict[Launch, list[str]]:
    """Return the distinct launches of all rounds, each with the names of its rounds."""
    found: dict[Launch, list[str]] = {}
    fresh: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        fresh.append(specialised(kernel, args, options))

    dispatch, JITFunction.run = JITFunction.run, run  # Triton's dispatcher needs a GPU
    try:
        for name in rounds():
            for launch in fresh:
                users = found.setdefault(launch, [])
                if name not in users:
                    users.append(name)
            fresh.clear()
    finally:
        JITFunction.run = dispatch
    return found


def compiled(launch: Launch, arch: int, used_by: str) -> Report:
    target = GPUTarget("cuda", arch, 32)
    binary = triton.compile(launch.source(arch), target=target, options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    local = usage["STACK"] + usage["LOCAL"]
    shared = binary.metadata.shared
    threads = 32 * binary.metadata.num_warps
    loads = threads * bytes_loaded(binary.asm["ptx"], shared // threads)
    ptx = binary.asm["ptx"]
    arguments = [name for name, kind in launch.signature if kind != "constexpr"]
    return Report(
        launch.kernel.__name__,
        arch,
        usage["REG"],
        local,
        shared,
        threads,
        loads,
        "tf32" in ptx,
        used_by,
        first_events(ptx, arguments),
        count_waits(ptx),
        atomics(ptx),
    )


def bytes_loaded(ptx: str, most_copied: int) -> int:
    """Return the bytes that a thread loads if it runs each load of its code once.

    Copies to shared memory are under way at most as its part of the memory allows, `most_copied`.
    """
    copied = sum(int(size, 16) for size in COPY.findall(ptx))
    loaded = sum(int(width or 1) * int(bits) // 8 for width, bits in LOAD.findall(ptx))
    return min(copied, most_copied) + loaded


def main(module: str, function: str) -> None:
    for launch, users in record(getattr(importlib.import_module(module), function)).items():
        for arch in LIMITS:
            print(json.dumps(asdict(compiled(launch, arch, ", ".join(users)))), flush=True)


def compile_ahead(module: str, function: str) -> list[Report]:
    """Compile in a separate process and print a table; assert that nothing spills and all fits.

    All kernels with a fault are named, not only the first.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, module, function]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [Report(**json.loads(line)) for line in done.stdout.splitlines()]
    print(
        f"{'kernel':18} {'arch':>4} {'registers':>9} {'local':>5} {'shared':>7} {'programs':>8} "
        f"{'in flight':>9}  used by"
    )
    for r in reports:
        print(
            f"{r.kernel:18} {r.arch:4} {r.registers:9} {r.local:5} {r.shared:7} {r.programs:8} "
            f"{r.in_flight:9}  {r.used_by}"
        )
    found = [f"{fault}: {report}" for report in reports for fault in faults_of(report)]
    assert not found, "\n".join(found)
    return reports


def faults_of(report: Report) -> list[str]:
    """Return what a kernel must not do, but does."""
    checks = {
        "loads nothing": report.in_flight <= 0,
        "spills": report.local > STACK,
        "too much shared memory": report.shared > LIMITS[report.arch],
        "multiplies in TF32": report.rounds,
    }
    return [fault for fault, is_found in checks.items() if is_found]


if __name__ == "__main__":
    main(*sys.argv[1:])
