"""The names of GGUF files: parts of a split one, NAME-00001-of-00003.gguf, and sidecars."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TypeVar

from engine.errors import ConfigError, listed

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
# Image encoders, heads that draft tokens, importance matrices, adapters and vocabularies.
SIDECAR = re.compile(
    r"(mtp|eagle3|dflash|dspark)-.*|(.*[-._])?(mmproj|imatrix)([-._].*)?|.*[-._](lora|vocab)",
    re.IGNORECASE,
)
IMAGE_ENCODER = re.compile(r"(.*[-._])?mmproj([-._].*)?", re.IGNORECASE)
# The best first: released weights are bf16, and other types cost memory or bits.
PRECISION = re.compile(r"[-._](bf16|f16|f32|q8_0)(?=[-._]|$)", re.IGNORECASE)
PRECISIONS = ("bf16", "f16", "f32", "q8_0")
MAX_PARTS = 999
AnyPath = TypeVar("AnyPath", bound=PurePath)


def is_gguf(file: PurePath) -> bool:
    return file.suffix.lower() == ".gguf"


def is_first_part(file: PurePath) -> bool:
    """Return whether the file is whole, or the first part of a split one."""
    match = SPLIT.fullmatch(file.name)
    return match is None or int(match[2]) == 1


def is_sidecar(file: PurePath) -> bool:
    """Return whether the name is that of a file that belongs to a model, and is none itself."""
    return SIDECAR.fullmatch(name_of(file)) is not None


def image_encoders(files: Iterable[AnyPath]) -> list[AnyPath]:
    """Return those that are image encoders by their names, in the order of their use."""

    def order(file: AnyPath) -> tuple[int, str]:
        found = PRECISION.search(name_of(file))
        rank = PRECISIONS.index(found[1].lower()) if found else len(PRECISIONS)
        return rank, file.name

    found = [file for file in files if is_gguf(file) and IMAGE_ENCODER.fullmatch(name_of(file))]
    return sorted(found, key=order)


def name_of(file: PurePath) -> str:
    """Return the file's name without its part and ending."""
    match = SPLIT.fullmatch(file.name)
    return match[1] if match else file.stem


def parts_of(file: AnyPath) -> list[AnyPath]:
    """Return all parts that the name of one tells of, the first one first.

    Raises ConfigError if there are too many.
    """
    match = SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match[3])
    if not 0 < count <= MAX_PARTS:
        raise ConfigError(f"{file.name} names {count} parts; at most {MAX_PARTS} are read.")
    names = (f"{match[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    return [file.with_name(name) for name in names]


def present_parts(file: Path) -> list[Path]:
    """Return the parts of a local file. Raises ConfigError if one is missing."""
    files = parts_of(file)
    if missing := [each.name for each in files if not each.is_file()]:
        raise ConfigError(f"{file.parent} lacks {listed(missing)}, a part of the model.")
    return files
