"""Every launch of sums of ranks that published models make, on meta tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.kernels.triton.rank_sum import (
    BLOCK_BYTES,
    SumBuffers,
    programs_of,
    rank_sum,
    rank_sum_norm,
)
from tests.support.aot import LIMITS, record

SIZES = (1024, 4096, 8192)  # hidden sizes of Qwen3-0.6B, Llama-3.1-8B and Llama-3.3-70B


def buffers(ranks: int, own: int, block_bytes: int) -> SumBuffers:
    peers = torch.empty(ranks, dtype=torch.int64, device="meta")
    numbers = torch.empty(programs_of(block_bytes), dtype=torch.int32, device="meta")
    return SumBuffers(own, peers, numbers, block_bytes)


def everything() -> Iterator[str]:
    for ranks, own in ((2, 0), (2, 1), (8, 5)):
        for size in SIZES:
            for rows in (1, 3, 16):
                x = torch.empty(rows, size, dtype=torch.bfloat16, device="meta")
                rank_sum(x, buffers(ranks, own, BLOCK_BYTES))
                yield f"{ranks} ranks, {rows} x {size}"
                weight = torch.empty(size, dtype=torch.bfloat16, device="meta")
                rank_sum_norm(x, x, weight, 1e-5, buffers(ranks, own, x[0].nbytes))
                yield f"{ranks} ranks, {rows} x {size} and norm"


def events(ptx: str) -> list[str]:
    """Return, in their order, what a program does with memory that others see."""
    kinds = {
        r"griddepcontrol\.wait": "wait for inputs",
        r"bar\.sync": "barrier",
        r"atom\.global\.sys\.release\.exch": "release",
        r"atom\.global\.release\.sys\.exch": "release",
        r"atom\.global\.acquire\.sys\.cas": "acquire",
        r"atom\.global\.sys\.acquire\.cas": "acquire",
        r"ld\.global\.cg": "read a part",
        r"ld\.global": "load",
        r"st\.global\S*\.v4\.b32": "store",
        r"st\.global": "narrow store",
    }
    found = []
    for line in ptx.splitlines():
        for pattern, name in kinds.items():
            if re.search(rf"\b{pattern}\b", line):
                if found[-1:] != [name]:
                    found.append(name)
                break
    return found


def main() -> None:
    """Print the events of each kernel of rank 1 of 2 as a line of JSON."""
    for launch in record(everything):
        constants = dict(launch.constants)
        if constants["RANKS"] != 2 or constants["OWN"] != 1:
            continue
        for arch in LIMITS:
            target = GPUTarget("cuda", arch, 32)
            binary = triton.compile(
                launch.source(arch), target=target, options=dict(launch.options)
            )
            print(json.dumps([launch.kernel.__name__, arch, events(binary.asm["ptx"])]))


if __name__ == "__main__":
    main()
