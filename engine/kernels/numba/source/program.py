"""Run recorded kernels one after another. The threads stay together, and wait for each other."""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import LAUNCH, ProgramCall
from engine.kernels.numba.source.intrinsics import array_at, take
from engine.kernels.numba.source.llvm import INT32, INT64, declare

SPINS = 20_000  # checks of a waiting thread before it gives its core to others
HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")


@intrinsic
def run_kernel(typing, kernel, call):
    """Call the kernel at an address with its arguments at another."""

    def code(context, builder, signature, arguments):
        function = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        kernel, call = arguments
        place = builder.inttoptr(kernel, function.as_pointer())
        builder.call(place, [builder.inttoptr(call, cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def number_from(typing, function):
    """Call the C function at this address, which returns an int."""

    def code(context, builder, signature, arguments):
        kind = ir.FunctionType(INT32, [])
        place = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.sext(builder.call(place, []), INT64)

    return types.int64(types.int64), code


@intrinsic
def arrived(typing, counter):
    """Return the number at this address; the writes of those who arrived are then visible."""

    def code(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def pause(typing):
    """Let the other thread of the core run for a moment."""

    def code(context, builder, signature, arguments):
        if HAS_PAUSE:
            builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def give_up_core(typing):
    """Let another thread that waits for a core have this one."""

    def code(context, builder, signature, arguments):
        builder.call(declare(builder, "sched_yield", INT32, []), [])
        return context.get_dummy_value()

    return types.void(), code


@njit(inline="always")
def meet(counter, threads):
    """Wait until all threads have arrived here."""
    number = take(counter)
    due = (number // threads + 1) * threads
    spins = 0
    while arrived(counter) < due:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            give_up_core()


def program_kernel():
    """Return the kernel that runs a part of a program."""

    def run(pointer):
        call = carray(pointer, 1)[0]
        threads = number_from(call.team_size)
        launches = array_at(call.launches, (1,), LAUNCH)
        for index in range(call.first, call.end):
            launch = launches[index]
            run_kernel(launch.kernel, launch.call)
            meet(call.counter, threads)

    return run, ProgramCall
