"""`engine.command engine.weights.merge OUT RECIPE`, the recipe in JSON: a model made of models.

Each chunk of each tensor is read, added up and written before the next, so that memory depends on
neither the models nor their largest tensor. The result's folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from engine.config import CHECKPOINT_FILES, WEIGHTS_INDEX, full_path, weight_files
from engine.errors import ConfigError
from engine.weights import blend
from engine.weights.recipe import Ema, Linear, Liti, Recipe, inputs, parse, template
from engine.weights.tensors import FLOATS, Checkpoint, Declared, StoredTensor, write_file

RECORD = "merge.json"
# Keys of config.json that may differ without a word: they do not say what is computed.
UNIMPORTANT = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}


def merge(recipe: Recipe, out: Path, progress: Callable[[float], None]) -> list[str]:
    """Writes the merged model to the folder `out`, which must be empty or absent; returns what
    the models differ in that is not merged. Raises ConfigError naming what does not fit."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give a new one.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder, so {out.name} cannot be made in it.")
    if out.is_dir():
        _make_anew(out)
    layout = Checkpoint.open(template(recipe))
    models = [Checkpoint.open(name) for name in inputs(recipe)]
    names = _common_tensors([layout, *models])
    notes = [note for model in models for note in _differences(layout, model)]
    staging = out.parent / f".{out.name}-{os.getpid()}"
    try:
        staging.mkdir()
        _copy_files(layout, staging, recipe.dtype)
        _write_weights(recipe, layout, models, names, staging, progress)
        record = json.dumps(_record(recipe, models, notes), indent=2)
        (staging / RECORD).write_text(record + "\n", encoding="utf-8")
        staging.rename(out)
    except OSError as error:
        raise ConfigError(f"Cannot merge into {out}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return notes


def _make_anew(out: Path) -> None:
    """Tries before the work what the merged folder does after it: to take the place of `out`.
    Raises ConfigError where that fails, as it does with every kind of mount point."""
    try:
        out.rmdir()
        out.mkdir()
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be replaced by the merged folder: {error.strerror}. If it is a mount "
            f"point, give {out / 'merged'}."
        ) from error


def _common_tensors(models: Sequence[Checkpoint]) -> set[str]:
    """The names to merge. Raises ConfigError where the models are not of one architecture, or a
    tensor is not in all of them, or not of one shape."""
    first, *others = models
    common = set.intersection(*(set(model.tensors) for model in models))
    for other in others:
        mine, its = first.config.get("architectures"), other.config.get("architectures")
        if mine != its:
            raise ConfigError(
                f"{first.folder} is {mine} and {other.folder} is {its}: only models of one "
                "architecture can be merged."
            )
        for name in sorted(common):
            a, b = first.tensors[name], other.tensors[name]
            if a.shape != b.shape:
                raise ConfigError(
                    f"{name} has shape {list(a.shape)} in {a.file} but {list(b.shape)} in {b.file}."
                )
    # With the first one's config a copy of the embedding is loaded as a head of its own.
    needed = {"lm_head.weight"} if first.config.get("tie_word_embeddings") is False else set()
    for model in models:
        for name in sorted(model.tensors.keys() - common):
            if name in needed or not _is_tied_copy(model, name, common):
                lacking = next(m.folder for m in models if name not in m.tensors)
                raise ConfigError(f"{name} is in {model.tensors[name].file} but not in {lacking}.")
    return common


def _is_tied_copy(model: Checkpoint, name: str, common: set[str]) -> bool:
    """Whether a tensor is another one again: some files hold the tied head beside the embedding."""
    copy = model.tensors[name]
    return any(
        (other.shape, other.dtype) == (copy.shape, copy.dtype) and _equal(copy, other)
        for other in (model.tensors[n] for n in common)
    )


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    pairs = itertools.zip_longest(a.chunks(), b.chunks())
    return (a.dtype, a.size) == (b.dtype, b.size) and all(x == y for x, y in pairs)


def _differences(layout: Checkpoint, model: Checkpoint) -> Iterator[str]:
    ours, its = layout.config, model.config
    for key in sorted((ours.keys() | its.keys()) - UNIMPORTANT):
        if ours.get(key) != its.get(key):
            yield f"{key} stays {ours.get(key)!r}; in {model.folder} it is {its.get(key)!r}"
    files = [m.folder / "tokenizer.json" for m in (layout, model)]
    if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
        yield f"tokenizer.json stays that of {layout.folder}; in {model.folder} it is another"


def _copy_files(layout: Checkpoint, to: Path, dtype: str | None) -> None:
    for file in (f for pattern in CHECKPOINT_FILES for f in layout.folder.glob(pattern)):
        copy = to / file.relative_to(layout.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if dtype is not None:
        told = {key: dtype for key in ("dtype", "torch_dtype") if key in layout.config}
        (to / "config.json").write_text(json.dumps(layout.config | told, indent=2) + "\n")


def _write_weights(
    recipe: Recipe,
    layout: Checkpoint,
    models: Sequence[Checkpoint],
    names: set[str],
    to: Path,
    progress: Callable[[float], None],
) -> None:
    """Tensors in the files, and in the order, in which `layout` has them."""
    files: dict[str, dict[str, Declared]] = {}
    for name, tensor in layout.tensors.items():
        if name in names:
            files.setdefault(tensor.file.name, {})[name] = _declared(tensor, recipe.dtype)
    total, done = sum(size for file in files.values() for *_, size in file.values()), 0

    def chunks(file: dict[str, Declared]) -> Iterator[memoryview]:
        nonlocal done
        for name, (dtype, *_) in file.items():
            for chunk in _merged(recipe, name, [model.tensors[name] for model in models], dtype):
                yield chunk
                progress((done := done + len(chunk)) / total)

    for file_name, file in files.items():
        write_file(to / file_name, file, chunks(file))
    if (layout.folder / WEIGHTS_INDEX).is_file():
        where = {name: file_name for file_name, file in files.items() for name in file}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (to / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _declared(tensor: StoredTensor, wanted: str | None) -> Declared:
    if wanted is None or tensor.dtype not in FLOATS:
        return tensor.dtype, tensor.shape, tensor.size
    dtype = next(name for name, known in FLOATS.items() if str(known) == f"torch.{wanted}")
    return dtype, tensor.shape, math.prod(tensor.shape) * FLOATS[dtype].itemsize


def _merged(
    recipe: Recipe, name: str, tensors: Sequence[StoredTensor], dtype: str
) -> Iterator[memoryview]:
    """The bytes of one merged tensor, as `dtype`. Raises ConfigError where it is not a tensor of
    floats and not the same in all models, and where the result is not finite."""
    if not {dtype, *(tensor.dtype for tensor in tensors)} <= FLOATS.keys():
        for other in tensors[1:]:
            if not _equal(tensors[0], other):
                raise ConfigError(
                    f"{name} differs between {tensors[0].file} ({tensors[0].dtype}) and "
                    f"{other.file} ({other.dtype}); only {', '.join(FLOATS)} can be merged."
                )
        yield from (memoryview(chunk) for chunk in tensors[0].chunks())
        return
    shares = _shares(recipe, tensors)
    for values in zip(*(tensor.floats() for tensor in tensors), strict=True):
        total = values[0].mul_(shares[0])
        for share, more in zip(shares[1:], values[1:], strict=True):
            total.add_(more, alpha=share)
        result = total.to(FLOATS[dtype])
        if not all(map(torch.isfinite, torch.aminmax(result))):
            files = " and ".join(str(tensor.file) for tensor in tensors)
            raise ConfigError(f"{name} of {files} comes out with NaN or infinity as {dtype}.")
        yield result.view(torch.uint8).numpy().data


def _shares(recipe: Recipe, tensors: Sequence[StoredTensor]) -> list[float]:
    match recipe:
        case Linear():
            weights = [source.parameters.weight for source in recipe.models]
            return blend.linear(weights, normalize=recipe.parameters.normalize)
        case Ema():
            return blend.ema(len(tensors), recipe.parameters.decay)
        case Liti():
            return blend.liti(recipe.parameters.t)
    dot, norms = _dot_and_norms(*tensors)
    return blend.slerp(recipe.parameters.t, dot, norms)


def _dot_and_norms(a: StoredTensor, b: StoredTensor) -> tuple[float, tuple[float, float]]:
    """Of two tensors as vectors, in fp64: in fp32 the angle between near ones would be lost."""
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in zip(a.floats(), b.floats(), strict=True):
        x, y = x.double(), y.double()
        sums += torch.stack([x @ y, x @ x, y @ y])
    dot, *squares = sums.tolist()
    return dot, (math.sqrt(squares[0]), math.sqrt(squares[1]))


def _record(recipe: Recipe, models: Sequence[Checkpoint], notes: list[str]) -> dict[str, Any]:
    """What a reader of the merged folder needs to make it again."""
    versions = {name: importlib.metadata.version(name) for name in ("penstock", "torch")}
    return {
        "recipe": msgspec.to_builtins(recipe),
        "inputs": [
            {
                "folder": str(model.folder),
                "config_sha256": _sha256(model.folder / "config.json"),
                "bytes": {f.name: f.stat().st_size for f in weight_files(model.folder)},
            }
            for model in models
        ],
        "differences": notes,
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> int:
    """0 with the merged folder in place; 2 where nothing was written, for the reason on stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits by the `finally` clauses
    columns = TextColumn("merging"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    try:
        # Links followed: the finished folder is renamed to it, which cannot replace a link.
        out = full_path(Path(sys.argv[1]))
        recipe = parse(json.loads(sys.argv[2]))
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("", total=1.0)
            notes = merge(recipe, out, lambda share: bar.update(task, completed=share))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("penstock: stopped; nothing was written.\n")
        return 130
    for note in notes:
        sys.stderr.write(f"penstock: not merged: {note}\n")
    sys.stderr.write(f"penstock: wrote {out}; what was merged is in {out / RECORD}\n")
    return 0
