"""Merge models into a new one. `main` takes OUT and RECIPE, the recipe in JSON.

Each chunk of each tensor is read, summed and written before the next one. Memory use therefore does
not grow with the models or their largest tensor. The output folder appears only once complete.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from engine.checkpoint.adapter.weights import StoredAdapter
from engine.checkpoint.folder import full_path, weights_index
from engine.checkpoint.stored import FLOATS, StoredTensor
from engine.errors import ConfigError
from engine.offline.merge import blend
from engine.offline.merge.fold import Fold
from engine.offline.merge.recipe import (
    Ema,
    Linear,
    Liti,
    Lora,
    Recipe,
    inputs,
    parse,
    template,
)
from engine.offline.new_folder import Declared, Piece, copy_files, new_folder, write_weights
from engine.offline.new_folder_command import write_folder
from engine.offline.plain import Checkpoint, record_of

RECORD = "merge.json"
# Keys of config.json whose differences are not reported: they do not affect the computation.
UNIMPORTANT = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}


def merge(recipe: Recipe, out: Path, progress: Callable[[float], None]) -> list[str]:
    """Write the merged model to the folder `out`, which must be empty or absent.

    Returns descriptions of the differences that are not merged, such as values in config.json.
    Raises ConfigError if the models do not fit each other or `out` cannot be written.
    """
    layout = Checkpoint.open(template(recipe), "merged")
    models = [Checkpoint.open(name, "merged") for name in inputs(recipe)]
    names = _common_tensors([layout, *models])
    notes = [note for model in models for note in _differences(layout, model)]
    fold = None
    if isinstance(recipe, Lora):
        fold = Fold(StoredAdapter.open(recipe.adapter), layout)
    with new_folder(out) as staging:
        _write_weights(recipe, layout, models, names, staging, progress, fold)
        record = {"recipe": msgspec.to_builtins(recipe), "differences": notes, **record_of(models)}
        (staging / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        copy_files(layout.folder, staging, _changed(layout, recipe.dtype))
    return notes


def _common_tensors(models: Sequence[Checkpoint]) -> set[str]:
    """Return the names of the tensors to merge.

    Raises ConfigError if the models differ in architecture, or if a tensor is missing in one of
    them or differs in shape.
    """
    first, *others = models
    common = set.intersection(*(set(model.tensors) for model in models))
    for other in others:
        mine, its = first.config.get("architectures"), other.config.get("architectures")
        if mine != its:
            raise ConfigError(
                f"{first.folder} is {mine} and {other.folder} is {its}: only models of the same "
                "architecture can be merged."
            )
        for name in sorted(common):
            a, b = first.tensors[name], other.tensors[name]
            if a.shape != b.shape:
                raise ConfigError(
                    f"{name} has shape {list(a.shape)} in {a.file} but {list(b.shape)} in {b.file}."
                )
    # An untied head is loaded as a tensor of its own, even if it equals the token embedding.
    needed = {"lm_head.weight"} if first.config.get("tie_word_embeddings") is False else set()
    for model in models:
        for name in sorted(model.tensors.keys() - common):
            if name in needed or not _is_tied_copy(model, name, common):
                lacking = next(m.folder for m in models if name not in m.tensors)
                raise ConfigError(f"{name} is in {model.tensors[name].file} but not in {lacking}.")
    return common


def _is_tied_copy(model: Checkpoint, name: str, common: set[str]) -> bool:
    """Whether a tensor repeats another one, as a stored tied head repeats the token embedding."""
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
            mine, other = f"{ours.get(key)!r:.200}", f"{its.get(key)!r:.200}"
            yield f"{key} stays {mine}; in {model.folder} it is {other}"
    a, b = (m.folder / "tokenizer.json" for m in (layout, model))
    if a.is_file() and b.is_file() and not filecmp.cmp(a, b, shallow=False):
        yield f"tokenizer.json stays that of {layout.folder}; in {model.folder} it differs"


def _changed(layout: Checkpoint, dtype: str | None) -> dict[str, str]:
    """Return the keys of config.json that change with the dtype of the result."""
    if dtype is None:
        return {}
    return {key: dtype for key in ("dtype", "torch_dtype") if key in layout.config}


def _write_weights(
    recipe: Recipe,
    layout: Checkpoint,
    models: Sequence[Checkpoint],
    names: set[str],
    to: Path,
    progress: Callable[[float], None],
    fold: Fold | None,
) -> None:
    """Write the tensors to the same files, and in the same order, as in `layout`."""
    files: dict[str, dict[str, Declared]] = {}
    for name, tensor in layout.tensors.items():
        if name in names:
            file = files.setdefault(layout.name_of(tensor.file), {})
            file[name] = _declared(tensor, recipe.dtype)

    def pieces(file_name: str) -> Iterator[Piece]:
        for name, declared in files[file_name].items():
            tensors = [model.tensors[name] for model in models]
            changes = None if fold is None else fold.changes(name)
            for chunk in _merged(recipe, name, tensors, declared.dtype, changes):
                yield Piece(name, chunk)

    write_weights(to, files, pieces, progress, index=weights_index(layout.folder))


def _declared(tensor: StoredTensor, wanted: str | None) -> Declared:
    if wanted is None or tensor.dtype not in FLOATS:
        return Declared(tensor.dtype, tensor.shape, tensor.size)
    dtype = next(name for name, known in FLOATS.items() if str(known) == f"torch.{wanted}")
    return Declared(dtype, tensor.shape, math.prod(tensor.shape) * FLOATS[dtype].itemsize)


def _merged(
    recipe: Recipe,
    name: str,
    tensors: Sequence[StoredTensor],
    dtype: str,
    changes: Iterator[torch.Tensor] | None,
) -> Iterator[memoryview]:
    """Yield the bytes of one merged tensor, plus its `changes`, as `dtype`.

    A tensor that is not of floats is copied. Raises ConfigError if such a tensor differs between
    the models, or if a merged value is not finite.
    """
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
        if changes is not None:
            total.add_(next(changes))
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
        case Lora():
            return [1.0]
    dot, norms = _dot_and_norms(*tensors)
    return blend.slerp(recipe.parameters.t, dot, norms)


def _dot_and_norms(a: StoredTensor, b: StoredTensor) -> tuple[float, tuple[float, float]]:
    """Return the dot product and the norms of two tensors as vectors.

    They are computed in fp64, because fp32 would lose the angle between nearly parallel tensors.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in zip(a.floats(), b.floats(), strict=True):
        x, y = x.double(), y.double()
        sums += torch.stack([x @ y, x @ x, y @ y])
    dot, *squares = sums.tolist()
    return dot, (math.sqrt(squares[0]), math.sqrt(squares[1]))


def main() -> int:
    """Merge and return the exit status of `write_folder`."""
    return write_folder("merging", _merge_as_given)


def _merge_as_given(progress: Callable[[float], None]) -> list[str]:
    # Follow links: the finished folder is renamed to `out`, which cannot replace a link.
    out = full_path(Path(sys.argv[1]))
    recipe = parse(json.loads(sys.argv[2]))
    notes = merge(recipe, out, progress)
    not_merged = [f"not merged: {note}" for note in notes]
    return [*not_merged, f"wrote {out}; its recipe is in {out / RECORD}"]
