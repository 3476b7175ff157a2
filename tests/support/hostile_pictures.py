"""Damaged and hostile files of pictures, with a name for each."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.pictures import FILES, damaged, file_of, gradient, resized_header

SIZES = [
    *((1, 1), (65_535, 1), (1, 65_535), (7_000, 7_000), (16_383, 16_383), (65_535, 65_535)),
]
WRONG_TYPES = ["BMP", "TIFF", "PPM", "ICO", "JPEG2000", "PDF", "EPS"]


def mutated(seeds: range) -> Iterator[tuple[str, bytes]]:
    """Yield every file with the damage of every seed."""
    for name, made in FILES.items():
        data = made()
        for seed in seeds:
            yield f"{name}, seed {seed}", damaged(data, seed)


def hostile() -> Iterator[tuple[str, bytes]]:
    """Yield every file as it is, headers of any size, files of other types, and noise."""
    for name, made in FILES.items():
        yield name, made()
    for kind in ("PNG", "GIF", "JPEG", "WebP lossy", "WebP lossless", "WebP extended"):
        for width, height in SIZES:
            side = 16_383 if "WebP" in kind else 65_535
            yield kind, resized_header(kind, min(width, side), min(height, side))
    for kind in WRONG_TYPES:
        yield kind, file_of(gradient(), kind)
    for seed in range(20):
        noise = random.Random(seed).randbytes(300)
        for beginning in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a"):
            yield f"noise {seed} behind {beginning!r}", beginning + noise
