"""The Hugging Face folder of a GGUF file: written once to the user's cache, then reused.

It holds what the file says of the model and its tokenizer. The weights stay where they are: the
folder links to the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import NOTES
from engine.checkpoint.gguf.config import config_of
from engine.checkpoint.gguf.delta import without_drafter
from engine.checkpoint.gguf.encoders import pooling_files
from engine.checkpoint.gguf.end_tokens import tokens_of
from engine.checkpoint.gguf.header import read_floats, read_header
from engine.checkpoint.gguf.latent import latent_notes
from engine.checkpoint.gguf.llamas import longrope_config
from engine.checkpoint.gguf.pairing import encoders_beside, paired
from engine.checkpoint.gguf.parts import name_of, present_parts
from engine.checkpoint.gguf.sampling import sampling_of
from engine.checkpoint.gguf.settings import notes_on, own_settings
from engine.checkpoint.gguf.shapes import FACTORS, all_tensors, checked_tensors
from engine.checkpoint.gguf.tokenizer import (
    build_tokenizer,
    end_tokens,
    tokenizer_notes,
    tokenizer_settings,
)
from engine.checkpoint.image_config import NESTED_FILE
from engine.device.cache import cache_folder
from engine.errors import ConfigError


def folder_of(file: Path) -> Path:
    """Return the folder for a GGUF file, or for one part of a split one.

    An image encoder in the file's folder is taken in. Raises ConfigError if a file is damaged, if
    its model is not served, or if the image encoder does not fit.
    """
    files = present_parts(file)
    encoders = encoders_beside(file)
    name = f"{name_of(file)}-{_digest([*files, *encoders])}"
    parent = cache_folder("gguf")
    if parent is None:
        raise ConfigError("GGUF files need a cache folder: set XDG_CACHE_HOME.")
    folder = parent / name
    if not (folder / "config.json").is_file():
        _write(folder, files, encoders)
    return folder


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the files, and of this code, which decides what the folder holds."""
    found = hashlib.sha256()
    for file in files:
        facts = file.stat()
        found.update(f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]


def _write(folder: Path, files: Sequence[Path], encoders: list[Path]) -> None:
    """Write the folder completely or not at all. Another process may write it too."""
    headers = [read_header(file) for file in files]
    settings = headers[0].settings
    own = own_settings(settings)
    longest = own["context_length"]
    tokenizer = build_tokenizer(settings)
    count = len(tokens_of(settings))
    tensors = without_drafter(all_tensors(headers), own)
    tensors = checked_tensors(settings, count, tensors)
    factors, short, long = (
        read_floats(name, tensors[name]) if name in tensors else [] for name in FACTORS
    )
    config = config_of(settings, count, tensors, factors)
    config |= longrope_config(own, short, long, config.get("rope_scaling"))
    pair = paired(settings, config, encoders)
    config = pair.config
    ends = end_tokens(settings)
    sampling, ignored = sampling_of(settings, count)
    contents: dict[str, dict[str, Any] | list[str]] = {
        **pooling_files(settings),
        "tokenizer_config.json": tokenizer_settings(settings, longest),
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": ends,
            **sampling,
        },
        NOTES: [
            *tokenizer_notes(settings),
            *notes_on(settings),
            *latent_notes(settings, tensors),
            *ignored,
            *pair.notes,
        ],
        "config.json": config | {"eos_token_id": ends},
        **({} if pair.processor is None else {NESTED_FILE: pair.processor}),
    }
    linked = [*files, *([] if pair.encoder is None else [pair.encoder])]
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".begun-"))
        try:
            tokenizer.save(str(begun / "tokenizer.json"))
            for file in linked:
                (begun / file.name).symlink_to(file)
            for name, value in contents.items():
                (begun / name).parent.mkdir(mode=0o700, exist_ok=True)
                _write_json(begun / name, value)
            with contextlib.suppress(FileExistsError, OSError):
                begun.rename(folder)  # fails if another process was faster
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"Cannot write {folder}: {error}. Set XDG_CACHE_HOME.") from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"Cannot write {folder}. Set XDG_CACHE_HOME to a folder with room.")


def _write_json(file: Path, value: dict[str, Any] | list[str]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.chmod(file, 0o600)
