"""An identity of a checkpoint's weights that costs milliseconds. A copy of the files has the same.

It is no proof: of large files only a sample is read.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from engine.checkpoint.folder import weight_files
from engine.config import EngineConfig

SAMPLE_BYTES = 32 << 20  # of all files together; smaller checkpoints are read whole
PIECE_BYTES = 16 << 10


def weights_identity(config: EngineConfig, folder: Path) -> str:
    """Return the identity of the weights that are served from `folder`.

    Rounding is part of it. `Ready.quantization` does not name it where no kernel keeps the codes.
    Raises ConfigError or OSError if a file cannot be read.
    """
    identity = "dummy" if config.load_format == "dummy" else checkpoint_identity(folder)
    if config.quantization in (None, "none"):
        return identity
    return f"{identity} rounded to {config.quantization}"


def checkpoint_identity(folder: Path) -> str:
    """Return the identity of the configuration and the weights in `folder`, 16 hex digits.

    It covers the sizes of the files and evenly spaced pieces of each. The first piece has the begin
    of a file's header. Names and times do not count, so that a renamed copy has the same identity.
    Raises ConfigError or OSError if a file cannot be read.
    """
    files = [folder / "config.json", *weight_files(folder)]
    sizes = {file: file.stat().st_size for file in files}
    step = PIECE_BYTES * max(1, -(-sum(sizes.values()) // SAMPLE_BYTES))
    digest = hashlib.blake2b(digest_size=8)
    for file, size in sizes.items():
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as stream:
            for start in range(0, size, step):
                digest.update(os.pread(stream.fileno(), PIECE_BYTES, start))
    return digest.hexdigest()
