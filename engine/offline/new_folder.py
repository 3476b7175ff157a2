"""Write a model folder: complete or not at all, and its tensors in pieces."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import CHECKPOINT_FILES
from engine.errors import ConfigError


class Piece(NamedTuple):
    """The next bytes of a tensor."""

    name: str
    data: memoryview


class Declared(NamedTuple):
    """A tensor that will be written."""

    dtype: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]
    size: int  # bytes


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that replaces `out`, which must be empty or absent, at the end.

    It is removed if the block raises. Raises ConfigError if `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give a new one.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder, so {out.name} cannot be created in it.")
    if out.is_dir():
        _make_anew(out)
    staging = out.parent / f".{out.name}-{os.getpid()}"
    try:
        staging.mkdir()
        yield staging
        staging.rename(out)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _make_anew(out: Path) -> None:
    """Delete and re-create `out`, to check early that a new folder can replace it.

    Raises ConfigError if that fails, as it does for every kind of mount point.
    """
    try:
        out.rmdir()
        out.mkdir()
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be replaced by the new folder: {error.strerror}. If it is a mount "
            f"point, give {out / 'model'}."
        ) from error


def copy_files(folder: Path, to: Path, changed: Mapping[str, Any]) -> None:
    """Copy the files of a checkpoint except its weights, with `changed` keys in config.json.

    Call it once the weights are written: a process that is killed before leaves no config.json.
    """
    for file in (f for pattern in CHECKPOINT_FILES for f in folder.glob(pattern)):
        copy = to / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if changed:
        config = {**read_json(folder / "config.json"), **changed}
        (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_weights(
    folder: Path,
    files: Mapping[str, Mapping[str, Declared]],
    pieces: Callable[[str], Iterable[Piece]],
    progress: Callable[[float], None],
    *,
    index: str | None,
) -> None:
    """Write safetensors files of the declared tensors, by file name.

    `pieces` yields the bytes for a file: those of each tensor in order. `index` names the file that
    gets the names of them all; None: it is not written.
    """
    total = sum(tensor.size for file in files.values() for tensor in file.values())
    done = 0

    def counted(name: str) -> Iterator[Piece]:
        nonlocal done
        for piece in pieces(name):
            yield piece
            done += piece.data.nbytes
            progress(done / total)

    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _write_file(folder / name, tensors, counted(name))
    if index is not None:
        where = {name: file_name for file_name, file in files.items() for name in file}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / index).write_text(json.dumps(content, indent=2) + "\n")


def _write_file(file: Path, tensors: Mapping[str, Declared], pieces: Iterable[Piece]) -> None:
    """Write a safetensors file. Its tensors lie in the order in which they are declared."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the data, which readers memory-map
    begin = 8 + len(text)
    places = {name: begin + header[name]["data_offsets"][0] for name in tensors}
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, data in pieces:
            stream.seek(places[name])
            places[name] += stream.write(data)
    for name, place in places.items():
        assert place == begin + header[name]["data_offsets"][1], f"{name} is not written in full"
