"""The models behind one address: their names, their settings, and where they come from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.checkpoint.gguf.parts import is_first_part, is_gguf, is_sidecar, name_of
from engine.config import EngineConfig, adapter_sources, setting
from engine.errors import ConfigError
from server.config import ServerConfig, served_names

SEVERAL = "Several models"
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
OWN_KEYS = ("model", "aliases", "keep_alive", "preload")  # of a table, besides settings
NOT_IN_FOLDER_NAME = re.compile(r"[^A-Za-z0-9._-]")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `penstock serve` that only several models have."""

    models_dir: Annotated[
        str | None,
        setting(SEVERAL, "Folder whose models are served: folders, ORG/NAME folders, GGUF files."),
    ] = None
    models_file: Annotated[
        str | None, setting(SEVERAL, "TOML file of models, with names, aliases and settings.")
    ] = None
    keep_alive: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        setting(
            SEVERAL,
            "Seconds without a request after which a model is unloaded. Default: a model stays "
            "until another one needs its memory.",
        ),
    ] = None
    memory: Annotated[
        Annotated[int, msgspec.Meta(ge=1, extra={"size": True})] | None,
        setting(
            SEVERAL,
            "Bytes that loaded models may take together, by the numbers of --plan. Default: the "
            "memory that is free at the start, or the GPU's.",
        ),
    ] = None
    load_timeout: Annotated[
        float,
        setting(
            SEVERAL,
            "Seconds that a request waits for its model to load; then it gets a 503 with "
            "Retry-After.",
            gt=0,
        ),
    ] = 120.0


@dataclass(frozen=True)
class ModelSpec:
    """One model: how it is called, and how its server is configured."""

    name: str
    server: ServerConfig
    engine: EngineConfig
    aliases: tuple[str, ...] = ()
    keep_alive: float | None = None  # seconds
    preload: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may use: the model's, its aliases and its adapters'."""
        adapters = [source.name for source in adapter_sources(self.engine)]
        return (self.name, *self.aliases, *adapters)

    @property
    def folder_name(self) -> str:
        """The name of its folder in --batch-dir."""
        return NOT_IN_FOLDER_NAME.sub("_", self.name)


# Returns the spec of a model: its name or None, and its settings by field name.
SpecMaker = Callable[[str | None, dict[str, Any]], ModelSpec]


@dataclass
class Catalog:
    """All models by name. `scan` finds those that have been added to --models-dir."""

    scan: Callable[[], Iterable[ModelSpec]] = tuple
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    _by_name: dict[str, ModelSpec] = field(default_factory=dict)

    def add(self, spec: ModelSpec) -> None:
        """Add a model. Raises ConfigError if another one has one of its names."""
        for name in spec.names:
            if (other := self._by_name.get(name)) is not None:
                raise ConfigError(
                    f"Two models have the name {name}: {other.engine.model} and "
                    f"{spec.engine.model}. Give them names in a file of --models-file."
                )
        self.specs[spec.name] = spec
        self._by_name |= dict.fromkeys(spec.names, spec)

    def refresh(self) -> None:
        """Add the models of --models-dir whose names are not taken."""
        for spec in self.scan():
            if not self._by_name.keys() & set(spec.names):
                self.add(spec)

    def find(self, name: str) -> ModelSpec | None:
        """Return the model that has a name, perhaps with Ollama's tag `:latest`."""
        spec = self._known(name)
        if spec is None:
            self.refresh()
            spec = self._known(name)
        return spec

    def _known(self, name: str) -> ModelSpec | None:
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))


def models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the models in a folder: two levels of folders, and GGUF files.

    Raises ConfigError if the folder cannot be read.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir: cannot read {folder}: {error.strerror}.") from None
    for entry in entries:
        if is_gguf(entry):
            if is_first_part(entry) and not is_sidecar(entry):
                yield name_of(entry), entry
        elif is_model(entry):
            yield entry.name, entry
        elif entry.is_dir() and not entry.name.startswith("."):
            for inner in sorted(entry.iterdir()):
                if is_model(inner):
                    yield f"{entry.name}/{inner.name}", inner


def is_model(folder: Path) -> bool:
    """Whether a folder has a checkpoint: a config.json, or GGUF files."""
    if not folder.is_dir():
        return False
    return (folder / "config.json").is_file() or any(map(is_gguf, folder.iterdir()))


def read_models_file(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML file by model name, their keys with underscores.

    Raises ConfigError if the file is not of this form.
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {file}: {error}") from None
    tables = document.pop("models", None)
    if document or not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{file} must have one table for each model: [models.NAME].")
    found = {}
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("model"), str):
            raise ConfigError(f'{file}, models.{name}: give its checkpoint: model = "…".')
        found[name] = {key.replace("-", "_"): value for key, value in table.items()}
    return found


def specs_in_file(file: Path, make: SpecMaker) -> Iterator[ModelSpec]:
    """Yield the models of a TOML file. Raises ConfigError, which names the table."""
    for name, table in read_models_file(file).items():
        try:
            yield make(name, table)
        except ConfigError as error:
            raise ConfigError(f"{file}, models.{name}: {error}") from None


def default_name(server: ServerConfig, engine: EngineConfig) -> str:
    """Return the name of a model that was given none."""
    return served_names(server, engine.model)[0]
