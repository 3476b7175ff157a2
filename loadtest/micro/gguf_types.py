"""SmolLM2 in each of llama.cpp's types: the same numbers, and the same perplexity in both servers.

llama.cpp's own tool quantises the model. An importance matrix of ones goes with every type, because
some need one. Rows of 576 numbers do not fit blocks of 256: only the down projections of MLPs have
these types, and the tool takes its usual replacements for other matrices. TEXT is as for
`perplexity`.

With --blas, llama.cpp is also measured in a build with OpenBLAS. It multiplies in fp32, where its
other builds round inputs to 8 bits.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx2
import numpy as np
from tokenizers import Tokenizer

from engine.checkpoint.gguf.header import StoredTensor, read_header
from engine.checkpoint.gguf.kinds import KINDS
from engine.checkpoint.gguf.tensors import decode
from loadtest.gguf_model import write_gguf
from loadtest.micro.case import Bound, Case, Table
from loadtest.micro.perplexity import WINDOW, losses, text_of
from loadtest.peers import llama_library
from loadtest.peers.environments import BLAS, environment, quantized_gguf, smollm2
from loadtest.servers import Penstock

MOST_CHANGE = 0.005  # of perplexity
EVERYWHERE = "(attn|ffn)_.*"
DOWN = "ffn_down"
EXACT = ("--dtype", "float32", "--quantization", "none")
# The tool's name of a mixture -> the type in it, and the matrices that get it by an option.
MIXTURES: dict[str, tuple[str, str | None]] = {
    **{name: (name, None) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K")},
    **{name: (name, None) for name in ("Q2_0", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS")},
    **{name: (name, None) for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S")},
    "Q2_K_S": ("Q2_K", None),
    "IQ2_M": ("IQ2_S", None),
    "Q3_K_S": ("Q3_K", None),
    "Q4_K_M": ("Q4_K", None),
    "Q5_K_M": ("Q5_K", None),
    "Q8_0 with MXFP4": ("MXFP4", EVERYWHERE),
    "Q8_0 with NVFP4": ("NVFP4", EVERYWHERE),
    "Q8_0 with Q1_0": ("Q1_0", DOWN),
}
NUMBERS = {kind.name: number for number, kind in KINDS.items()}


class Sources(NamedTuple):
    """The files that all types are made of."""

    root: Path  # of the environments
    home: Path  # llama.cpp's
    whole: Path  # the model in bfloat16
    importance: Path


def sources_of(root: Path, folder: Path) -> Sources:
    """Make what is missing in `folder`."""
    model = smollm2(root)
    folder.mkdir(parents=True, exist_ok=True)
    whole, importance = folder / "BF16.gguf", folder / "ones.dat"
    if not whole.exists():
        write_gguf(model, whole, "BF16")
    if not importance.exists():
        tensors = read_header(whole).tensors
        matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}
        inputs = {name: tensor.shape[1] for name, tensor in matrices.items()}
        llama_library.write_even_importance(importance, inputs)
    return Sources(root, environment("llama.cpp", root), whole, importance)


def quantized(sources: Sources, mixture: str) -> Path:
    """Return the model in a mixture of MIXTURES; make it if it is missing."""
    kind, pattern = MIXTURES[mixture]
    file = sources.whole.with_name(f"{mixture.replace(' ', '-')}.gguf")
    if not file.exists():
        options = ["--imatrix", str(sources.importance)]
        if pattern is not None:
            options += ["--tensor-type", f"{pattern}={kind.lower()}"]
        begun = file.with_suffix(".part")
        quantized_gguf(sources.whole, begun, mixture.split()[0], sources.root, options)
        begun.rename(file)
    kinds = {tensor.kind.name for tensor in read_header(file).tensors.values()}
    assert kind in kinds, f"{mixture} has no {kind}, but {kinds}"
    return file


def different(home: Path, stored: StoredTensor) -> int:
    """Return how many numbers of a tensor differ from llama.cpp's in any bit."""
    raw = np.fromfile(stored.file, np.uint8, stored.nbytes, offset=stored.offset)
    blocks = raw.reshape(-1, stored.kind.nbytes)
    due = llama_library.dequantized(home, blocks, NUMBERS[stored.kind.name])
    found = decode(stored).numpy().ravel()
    return int((due.view(np.int32) != found.view(np.int32)).sum())


def check_numbers(home: Path, file: Path) -> int:
    """Return the number of quantised tensors. Raises SystemExit if one differs from llama.cpp's."""
    tensors = read_header(file).tensors
    packed = {name: tensor for name, tensor in tensors.items() if tensor.kind.block > 1}
    for name, tensor in packed.items():
        if count := different(home, tensor):
            raise SystemExit(f"{name} in {file}: {count} numbers differ from llama.cpp's.")
    return len(packed)


def losses_of_llama(home: Path, file: Path, windows: Sequence[Sequence[int]]) -> list[float]:
    """Return what llama.cpp computes, in a process of its own."""
    given = json.dumps({"home": str(home), "file": str(file), "windows": windows})
    command = [sys.executable, "-m", "loadtest.peers.llama_library"]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


async def losses_of_penstock(
    file: Path, windows: Sequence[list[int]], flags: Sequence[str] = ()
) -> list[float]:
    with Penstock(str(file), flags) as server:
        address = f"http://{server.address}"
        async with httpx2.AsyncClient(base_url=address, timeout=600) as client:
            return await losses(client, windows)


def perplexity(losses: Sequence[float]) -> float:
    return math.exp(statistics.fmean(losses))


def change(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return by how much a perplexity differs from another one, with its standard error."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean = math.expm1(statistics.fmean(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{100 * mean:+.2f} ± {100 * error:.2f} %"


def windows_of(model: Path, text: str, tokens: int) -> list[list[int]]:
    """Return windows of at most WINDOW tokens, `tokens` in all."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids[:tokens]
    assert len(ids) == tokens, f"the text has {len(ids)} tokens"
    return [ids[first : first + WINDOW] for first in range(0, tokens, WINDOW)]


def peers_of(sources: Sources, *, blas: bool) -> dict[str, Path]:
    """Return the builds of llama.cpp to compare with, the one of the bound first."""
    if not blas:
        return {"llama.cpp": sources.home}
    return {"llama.cpp with BLAS": environment(BLAS, sources.root), "llama.cpp": sources.home}


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    root = options.environments.absolute()
    sources = sources_of(root, options.folder)
    text = "\n".join(text_of(file) for file in options.text)
    windows = windows_of(smollm2(root), text, options.tokens)
    peers = peers_of(sources, blas=options.blas)
    nearest = next(iter(peers))
    samples: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    bounds: list[Bound] = []
    for mixture in options.mixture or MIXTURES:
        file = quantized(sources, mixture)
        count = check_numbers(sources.home, file)
        found = {mixture: asyncio.run(losses_of_penstock(file, windows))}
        size = file.stat().st_size / 1e6
        notes[mixture] = f"{count} equal tensors; {size:.0f} MB"
        for peer, home in peers.items():
            theirs = losses_of_llama(home, file, windows)
            found[f"{peer} {mixture}"] = theirs
            notes[mixture] += f"; {change(found[mixture], theirs)} of {peer}"
        if options.exact:
            exact = asyncio.run(losses_of_penstock(file, windows, EXACT))
            for way, scored in found.items():
                parts = [notes[way]] if way in notes else []
                notes[way] = "; ".join([*parts, f"{change(scored, exact)} of exact"])
            found[f"exact {mixture}"] = exact
        samples |= {way: [perplexity(scored)] for way, scored in found.items()}
        bounds.append(Bound(mixture, f"{nearest} {mixture}", 1 - MOST_CHANGE))
        bounds.append(Bound(mixture, f"{nearest} {mixture}", 1 + MOST_CHANGE, at_most=True))
        for way in found:
            print(f"{way}: {samples[way][0]:.4f} {notes.get(way, '')}", flush=True)
    yield Table(samples, "perplexity", bounds=bounds, notes=notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2 * WINDOW)
    parser.add_argument("--mixture", action="append", choices=MIXTURES, help="default: all")
    parser.add_argument("--exact", action="store_true", help="also without rounding, in float32")
    parser.add_argument("--blas", action="store_true", help="bound by a llama.cpp without rounding")
    parser.add_argument("--folder", type=Path, default=Path("build/gguf-types"))
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("text", type=Path, nargs="+")


CASE = Case(__doc__, add_options, measure)
