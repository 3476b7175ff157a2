"""The models on this machine: `penstock list`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub as hub
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from engine.checkpoint.folder import DEMO_FOLDERS, model_folder, weight_files
from engine.errors import ConfigError, printable


@dataclass(frozen=True)
class LocalModel:
    """A model folder with safetensors weights; `size` is that of its weight files in bytes."""

    name: str
    size: int
    modified: float  # Unix seconds
    folder: Path


def local_models() -> Iterator[LocalModel]:
    """Yield the demo models, then the models that are complete in the Hugging Face cache."""
    for name in DEMO_FOLDERS:
        yield _described(name, model_folder(name))
    try:
        repositories = hub.scan_cache_dir().repos
    except hub.CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id.lower()):
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            try:
                yield _described(repository.repo_id, model_folder(str(revision.snapshot_path)))
            except ConfigError:
                continue  # without weights, or not a model folder


def _described(name: str, folder: Path) -> LocalModel:
    stats = [file.stat() for file in weight_files(folder)]
    size = sum(stat.st_size for stat in stats)
    return LocalModel(name, size, max(stat.st_mtime for stat in stats), folder)


def table_of(models: Iterator[LocalModel] | Sequence[LocalModel]) -> str:
    """Return the models as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("MODEL", "SIZE", "MODIFIED", "FOLDER"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "SIZE" else "left")
    for model in models:
        day = datetime.datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d")
        cells = model.name, decimal(model.size), day, str(model.folder)
        table.add_row(*[Text(printable(cell)) for cell in cells])  # a name may look like markup
    console = Console(width=1000, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
