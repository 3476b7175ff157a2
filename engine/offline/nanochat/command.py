"""`penstock import nanochat DIR`: convert a nanochat checkpoint to a folder that can be served.

The server's command runs this in a separate process, because it needs torch. The exit status is 2,
with one message on stderr, if the checkpoint cannot be imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.checkpoint.folder import full_path
from engine.errors import ConfigError
from engine.offline.nanochat.checkpoint import Checkpoint, find_checkpoint
from engine.offline.nanochat.encoding import read_encoding
from engine.offline.nanochat.generation import generation_of, served_config
from engine.offline.nanochat.tensors import served_tensors
from engine.offline.nanochat.tokenizer import build_tokenizer, write_json, write_tokenizer

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="penstock import nanochat")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args(arguments)
    try:
        import_nanochat(given.directory, given.out, given.step, given.tokenizer, _say)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def import_nanochat(
    directory: Path, out: Path | None, step: int | None, tokenizer: Path | None, say: Say
) -> Path:
    """Write the folder `out`, which must not exist, completely or not at all. Return its path.

    Raises ConfigError naming the file at fault and the part of it that is missing, wrong or not
    allowed.
    """
    checkpoint = find_checkpoint(directory, step)
    out = full_path(out) if out else Path(f"nanochat-{checkpoint.tag}")
    if out.exists():
        raise ConfigError(f"{out} already exists. Give another folder with --out.")
    file = _tokenizer_file(checkpoint, tokenizer)
    tokens = build_tokenizer(read_encoding(file), file)
    config, tensors = convert(checkpoint, say)
    if tokens.get_vocab_size() != config["vocab_size"]:
        raise ConfigError(
            f"{file} has {tokens.get_vocab_size()} tokens, but vocab_size in {checkpoint.meta} is "
            f"{config['vocab_size']}. Give the folder of this model's tokenizer with --tokenizer."
        )
    say(f"Using the tokenizer {file}.")
    size = sum(tensor.nbytes for tensor in tensors.values())
    say(f"Writing {len(tensors)} tensors, {size / 2**20:.0f} MiB, to {out} …")
    with _whole_or_not_at_all(out) as folder:
        write_json(folder / "config.json", config)
        write_tokenizer(tokens, folder, config["max_position_embeddings"])
        # The tensors are memory-mapped from the checkpoint, so writing them takes little memory.
        save_file(_separate(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # else it has 0600
    say(f"Done. Serve it with: penstock serve {out}")
    return out


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share their memory or have gaps, which safetensors does not write."""
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())

    def is_separate(tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return tensor.is_contiguous() and owners[storage.data_ptr()] == 1

    return {n: t if is_separate(t) else t.contiguous().clone() for n, t in tensors.items()}


def convert(checkpoint: Checkpoint, say: Say) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config.json and the tensors for it; report the inferred settings with `say`.

    Raises ConfigError if the checkpoint is not one of a known nanochat.
    """
    model, tensors = checkpoint.model_config(), checkpoint.tensors()
    generation = generation_of(checkpoint, tensors)
    served = served_tensors(checkpoint.weights, model, generation, tensors)
    sizes, facts = served_config(model, generation, served["model.embed_tokens.weight"].dtype)
    say(f"{checkpoint.weights} has the tensors of nanochat from {generation.dates}.")
    say("Inferred from the tensors and written into config.json:")
    for key, value in facts.items():
        say(f"  {key} = {value}")
    if generation.doubt:
        say(f"In doubt: {generation.doubt}")
    return sizes | facts, served


def _tokenizer_file(checkpoint: Checkpoint, given: Path | None) -> Path:
    """Find tokenizer.pkl in the folder `given`, or else near the checkpoint as upstream stores it.

    Raises ConfigError listing the places searched.
    """
    folder = checkpoint.weights.parent
    folders = [given] if given else [folder, folder / "tokenizer", folder.parents[1] / "tokenizer"]
    files = [folder / "tokenizer.pkl" for folder in folders]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        tried = ", ".join(map(str, files))
        raise ConfigError(f"No tokenizer at {tried}. Give its folder with --tokenizer.")
    return found


@contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """Yield a folder to write into. It is renamed to `out` on success and removed on failure."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
