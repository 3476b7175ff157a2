"""Damage to the files of --kv-cache-dir: each kind changes a file or puts another in its place."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HUGE = 1 << 40  # bytes, as a sparse file
SAMPLE = 8  # contents that are put in the place of others


@dataclass(frozen=True)
class Place:
    """A file to damage, contents of files of the same folder, and of those of other keys."""

    file: Path
    others: Sequence[bytes]
    foreign: Sequence[bytes]
    rng: random.Random

    def replace(self, data: bytes) -> None:
        self.file.write_bytes(data)

    def free(self) -> None:
        self.file.unlink()


def flip(place: Place) -> None:
    data = bytearray(place.file.read_bytes())
    data[place.rng.randrange(len(data))] ^= 1 << place.rng.randrange(8)
    place.replace(bytes(data))


def truncate(place: Place) -> None:
    os.truncate(place.file, place.rng.randrange(place.file.stat().st_size))


def append(place: Place) -> None:
    place.replace(place.file.read_bytes() + b"more")


def zeros(place: Place) -> None:
    place.replace(bytes(place.file.stat().st_size))


def noise(place: Place) -> None:
    place.replace(place.rng.randbytes(place.file.stat().st_size))


def other_content(place: Place) -> None:
    own = place.file.read_bytes()
    place.replace(place.rng.choice([content for content in place.others if content != own]))


def foreign_content(place: Place) -> None:
    place.replace(place.rng.choice(place.foreign))


def other_name(place: Place) -> None:
    place.file.rename(place.file.with_name(f"{place.rng.randbytes(16).hex()}0000.kv"))


def strange_name(place: Place) -> None:
    place.file.rename(place.file.with_name(f"-{place.rng.randrange(10**6)}.tmp"))


def huge(place: Place) -> None:
    os.truncate(place.file, HUGE)


def folder(place: Place) -> None:
    place.free()
    place.file.mkdir()


def full_folder(place: Place) -> None:
    folder(place)
    (place.file / "file").write_bytes(b"x")


def link_to_block(place: Place) -> None:
    target = place.file.read_bytes()
    place.free()
    outside = place.file.parents[2] / f"outside-{place.file.name}"
    outside.write_bytes(target)  # the right bytes, but not in the folder
    place.file.symlink_to(outside)


def link_to_device(place: Place) -> None:
    place.free()
    place.file.symlink_to("/dev/zero")


def fifo(place: Place) -> None:
    place.free()
    os.mkfifo(place.file)


Kind = Callable[[Place], None]
KINDS: tuple[Kind, ...] = (
    flip,
    truncate,
    append,
    zeros,
    noise,
    other_content,
    foreign_content,
    other_name,
    strange_name,
    huge,
    folder,
    full_folder,
    link_to_block,
    link_to_device,
    fifo,
    Place.free,
)


def block_files(folder: Path) -> list[Path]:
    """Return the files of blocks in a folder of --kv-cache-dir."""
    found = sorted(folder.glob("model-*/*.kv"))
    return [file for file in found if file.is_file() and not file.is_symlink()]


def damage(folder: Path, foreign: Sequence[bytes], seed: int, share: float = 1.0) -> int:
    """Damage a share of the files in a folder, in all ways in turn; return how many."""
    rng = random.Random(seed)
    files = block_files(folder)
    rng.shuffle(files)
    chosen = files[: round(share * len(files))]
    others = [file.read_bytes() for file in files[:SAMPLE]]
    for number, file in enumerate(chosen):
        KINDS[number % len(KINDS)](Place(file, others, foreign, rng))
    return len(chosen)
