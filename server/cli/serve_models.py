"""`penstock serve` with several models: one address, one server process for each loaded model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import replace as with_fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from engine.checkpoint.folder import is_hub_name
from engine.errors import ConfigError
from server import exit_codes
from server.cli.clean_exit import fail
from server.cli.console import logger_for
from server.cli.serve import (
    ConfigFile,
    OnlyPlan,
    check_temporary_folder,
    hide_secrets,
    option,
    parameter,
    serve,
)
from server.config import ServerConfig
from server.http.key_file import check_access
from server.http.listener import ListenError, listen
from server.models.catalog import (
    OWN_KEYS,
    Catalog,
    ModelSpec,
    Options,
    default_name,
    models_in,
    specs_in_file,
)
from server.settings import convert, load, settings, settings_of

OPTIONS = settings_of(Options)
OF_ONE_MODEL = (
    "served_model_name",
    "gguf_file",
    "record",
    "kv_cache_dir",
)  # settings that models cannot share


def serve_models(**values: Any) -> None:
    """Serve one or several models over an OpenAI-compatible API."""
    folders: list[str] = values.pop("folders") or []
    given = {setting.name: values.pop(setting.name) for setting in OPTIONS}
    if len(folders) < 2 and given["models_dir"] is None and given["models_file"] is None:
        unused = [setting.flag for setting in OPTIONS if given[setting.name] is not None]
        if unused:
            message = f"{unused[0]} needs several models, --models-dir or --models-file."
            raise fail(message, exit_codes.BAD_CONFIG)
        return serve(folder=folders[0] if folders else None, **values)
    hide_secrets()
    try:
        options = read_options(given)
        source = Source(values, folders, options)
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    from server.telemetry.logging import configure

    configure(source.server)
    fail_in_log = partial(fail, tell=logger_for(source.server, "error"))
    try:
        check_access(source.server)
        check_temporary_folder()
        catalog = source.catalog()
        listener = listen(source.server)
    except ConfigError as error:
        raise fail_in_log(error, exit_codes.BAD_CONFIG) from None
    except ListenError as error:
        raise fail_in_log(error, exit_codes.CANNOT_LISTEN) from None
    from server.cli.front_lifetime import run_front

    raise typer.Exit(run_front(source.server, options, catalog, listener))


def read_options(given: dict[str, Any]) -> Options:
    """Return the options of several models. Raises ConfigError."""
    values = {}
    for setting in OPTIONS:
        if (value := given[setting.name]) is not None:
            try:
                values[setting.name] = convert(setting, value)
            except msgspec.ValidationError:
                text = f"{setting.flag}: {value!r} is not {setting.allowed}."
                raise ConfigError(text) from None
    return Options(**values)


class Source:
    """Where the models of a command line come from, and the settings that they share.

    Raises ConfigError if a setting is not valid, or not possible for several models.
    """

    def __init__(self, values: dict[str, Any], folders: list[str], options: Options) -> None:
        self._file = values.pop("config")
        if values.pop("plan"):
            raise ConfigError("--plan shows one model at a time: give one MODEL.")
        if values.get("model") is not None:
            folders = [*folders, values.pop("model")]
        self._values, self._folders, self._options = values, folders, options
        self.server, engine, warnings = load(values, os.environ, self._file)
        for name in OF_ONE_MODEL:
            if getattr(self.server, name, None) or getattr(engine, name, None):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is for one model: set it in a file of --models-file.")
        for warning in warnings:
            logger_for(self.server, "warning")(f"penstock: warning: {warning}")

    def catalog(self) -> Catalog:
        """Return all models; those of huggingface.co are downloaded. Raises ConfigError."""
        catalog = Catalog(self._scan)
        for folder in self._folders:
            catalog.add(self._local(self._spec(None, {"model": folder})))
        if self._options.models_file is not None:
            for spec in specs_in_file(Path(self._options.models_file), self._spec):
                catalog.add(self._local(spec))
        catalog.refresh()
        if not catalog.specs:
            raise ConfigError(f"There is no model in {self._options.models_dir}.")
        return catalog

    def _scan(self) -> Iterator[ModelSpec]:
        if self._options.models_dir is not None:
            for name, path in models_in(Path(self._options.models_dir)):
                yield self._spec(name, {"model": str(path)})

    def _spec(self, name: str | None, table: dict[str, Any]) -> ModelSpec:
        """Return a model. `table` has its settings by field name. Raises ConfigError."""
        known = {setting.name for setting in settings()}
        for key in table:
            if key not in known and key not in OWN_KEYS:
                raise ConfigError(f"{key} is not a setting of a model.")
        settings_of_model = {k: v for k, v in table.items() if k in known}
        server, engine, _ = load(self._values | settings_of_model, os.environ, self._file)
        name = name or default_name(server, engine)
        aliases = table.get("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(a, str) for a in aliases):
            raise ConfigError("aliases must be a list of names.")
        keep_alive = table.get("keep_alive", self._options.keep_alive)
        if keep_alive is not None and not (isinstance(keep_alive, int | float) and keep_alive > 0):
            raise ConfigError(f"keep_alive: {keep_alive!r} is not a number of seconds above 0.")
        spec = ModelSpec(
            name,
            server,
            engine,
            aliases=tuple(aliases),
            keep_alive=keep_alive,
            preload=bool(table.get("preload", False)),
        )
        return with_fields(spec, server=child_config(spec))

    def _local(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with a local folder. Raises ConfigError."""
        from engine.checkpoint.folder import model_folder
        from server.cli.model_source import resolve_model

        tell = logger_for(self.server)
        name = spec.engine.model if is_hub_name(spec.engine.model) else spec.name
        server, engine = resolve_model(spec.server, spec.engine, tell, here=True)
        model_folder(engine.model)
        if spec.name == default_name(spec.server, spec.engine):
            spec = with_fields(spec, name=name)
        found = with_fields(spec, server=server, engine=engine)
        return with_fields(found, server=child_config(found))


def child_config(spec: ModelSpec) -> ServerConfig:
    """Return the configuration of a model's server: without what its parent does."""
    batch_dir = spec.server.batch_dir
    if batch_dir is not None and Path(batch_dir).name != spec.folder_name:
        batch_dir = str(Path(batch_dir, spec.folder_name))
    names = (spec.name, *spec.aliases)
    return replace(
        spec.server,
        served_model_name=names,
        allowed_origins=(),
        root_path="",
        gguf_file=None,
        batch_dir=batch_dir,
    )


# typer reads the options of a command from its signature.
MODELS = Annotated[
    list[str] | None, typer.Argument(metavar="MODEL", help="The same as --model; may repeat.")
]
_ONE = [option(setting) for setting in settings()]
serve_models.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        parameter("folders", MODELS),
        parameter("config", ConfigFile),
        parameter("plan", OnlyPlan),
        *_ONE,
        *map(option, OPTIONS),
    ]
)
serve_models.__annotations__ = {}
