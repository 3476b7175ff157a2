"""Write the quantised folder of a plain checkpoint.

Some rows of a matrix are read, rounded and written before the next ones, so memory use does not
grow with the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from engine.checkpoint.folder import weights_index
from engine.checkpoint.stored import StoredTensor
from engine.errors import ConfigError
from engine.offline.new_folder import Declared, Piece, copy_files, new_folder, write_weights
from engine.offline.plain import Checkpoint, record_of
from engine.offline.quantize.forms import FORMS, ROWS, Form

RECORD = "quantize.json"


def write_quantized(
    source: Checkpoint,
    out: Path,
    kind: str,
    layers: Collection[str],
    ignore: Sequence[str],
    progress: Callable[[float], None],
) -> None:
    """Write the folder `out`, which must be empty or absent, with `layers` in the form `kind`.

    `layers` are names of matrices in `source`; all other tensors are copied. `ignore` names the
    linear layers that stay plain. Raises ConfigError if a number is not finite, or if `out` cannot
    be written.
    """
    form = FORMS[kind]
    files: dict[str, dict[str, Declared]] = {}
    for name, tensor in source.tensors.items():
        file = files.setdefault(source.name_of(tensor.file), {})
        if name in layers:
            outputs, inputs = tensor.shape
            for ending, declared in form.declared(outputs, inputs).items():
                file[_part(name, ending)] = declared
        else:
            file[name] = Declared(tensor.dtype, tensor.shape, tensor.size)
    files = {file_name: _aligned(file) for file_name, file in files.items()}

    def pieces(file_name: str) -> Iterator[Piece]:
        for name, tensor in source.tensors.items():
            if source.name_of(tensor.file) != file_name:
                continue
            if name in layers:
                yield from _rounded(tensor, form)
            else:
                yield from (Piece(name, memoryview(chunk)) for chunk in tensor.chunks())

    with new_folder(out) as staging:
        write_weights(staging, files, pieces, progress, index=weights_index(source.folder))
        record = {"quantization": kind, **record_of([source])}
        (staging / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        copy_files(source.folder, staging, {"quantization_config": form.settings(ignore)})


def _part(name: str, ending: str) -> str:
    return name.removesuffix("weight") + ending


def _aligned(file: dict[str, Declared]) -> dict[str, Declared]:
    """Sort tensors by the size of an element, the largest first.

    Readers map files into memory, and torch takes a tensor only where its dtype is aligned.
    """
    widths = {name: tensor.size // max(math.prod(tensor.shape), 1) for name, tensor in file.items()}
    return {name: file[name] for name in sorted(file, key=lambda name: -widths[name])}


def _rounded(tensor: StoredTensor, form: Form) -> Iterator[Piece]:
    """Yield the stored tensors of a layer, some outputs at a time."""
    if "weight_shape" in form.declared(*tensor.shape):
        yield _piece(tensor, "weight_shape", torch.tensor(tensor.shape))
    for rows in tensor.rows(ROWS):
        if not rows.isfinite().all():
            raise ConfigError(f"{tensor.name} in {tensor.file} holds NaN or infinity.")
        stored = form.rounded(rows)
        if not stored["weight_scale"].isfinite().all():
            raise ConfigError(
                f"{tensor.name} in {tensor.file} holds numbers up to {float(rows.abs().max()):.3g},"
                f" whose scale is too large for {form.scale_dtype}."
            )
        for ending, part in stored.items():
            yield _piece(tensor, ending, part)


def _piece(tensor: StoredTensor, ending: str, part: torch.Tensor) -> Piece:
    raw = part.contiguous().flatten().view(torch.uint8)
    return Piece(_part(tensor.name, ending), raw.numpy().data)
