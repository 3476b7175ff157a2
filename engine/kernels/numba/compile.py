"""Compile a kernel. Importing this module imports Numba."""

from __future__ import annotations

import ctypes
import importlib

from llvmlite import binding as llvm
from numba import cfunc, types

from engine.kernels.numba.call import FLOAT, INT
from engine.kernels.numba.machine_code import MachineCode

EXACT = {"contract"}  # a product and a sum may fuse (one rounding); nothing is reordered
KINDS = {INT: types.int64, FLOAT: types.float64}


def compile_kernel(name: str, shape: tuple[int, ...]) -> MachineCode:
    """Compile the kernel "module.function" of `source/` for this shape."""
    module, _, function = name.partition(".")
    source = importlib.import_module(f"engine.kernels.numba.source.{module}")
    body, call = getattr(source, function)(*shape)
    kernel = cfunc(_signature(call), fastmath=EXACT, error_model="numpy")(body)
    _, _, (code, _) = kernel._library.serialize_using_object_code()
    return MachineCode(kernel.native_name, _runtime_functions(kernel.inspect_llvm()), code)


def _signature(call: type[ctypes.Structure]) -> types.Type:
    """Return the Numba signature of a kernel that takes this structure."""
    fields = [(field[0], KINDS[field[1]]) for field in call._fields_]
    return types.void(types.CPointer(types.Record.make_c_struct(fields)))


def _runtime_functions(assembly: str) -> list[str]:
    """Return the functions of Python and of Numba's runtime that the code refers to.

    They report errors and free arrays. Our kernels raise no error and allocate no array.
    """
    module = llvm.parse_assembly(assembly)
    values = [*module.functions, *module.global_variables]
    names = [value.name for value in values if value.is_declaration]
    return sorted(name for name in names if name.startswith(("numba_", "NRT_", "Py", "_Py")))
