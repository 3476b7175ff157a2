"""Run the programs of the kernels in a seeded order, in Triton's interpreter.

A GPU starts programs in any order. A result that is right only in the interpreter's order, which
ascends, is found by running a kernel in a few others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.interpreter import InterpreterBuilder


@contextmanager
def program_order(seed: int) -> Iterator[list[list[int]]]:
    """Permute the programs of each launch; yield the orders, one for each launch so far.

    An order holds linear program ids, in which the last axis of the grid changes fastest. The
    launches of one context have different permutations.
    """
    generator = random.Random(seed)
    orders: list[list[int]] = []
    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx

    def draw(self: Any, nx: int, ny: int, nz: int) -> None:
        set_dim(self, nx, ny, nz)
        programs = nx * ny * nz
        orders.append(generator.sample(range(programs), programs))

    def permute(self: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        x, rest = divmod(orders[-1][(x * ny + y) * nz + z], ny * nz)
        set_index(self, x, *divmod(rest, nz))

    with (
        mock.patch.object(InterpreterBuilder, "set_grid_dim", draw),
        mock.patch.object(InterpreterBuilder, "set_grid_idx", permute),
    ):
        yield orders
