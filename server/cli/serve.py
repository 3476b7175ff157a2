"""`penstock serve`: from flags, environment and file to a running server."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from engine.checkpoint.folder import model_folder
from engine.client.imports import quick_imports
from engine.config import EngineConfig
from engine.errors import ConfigError
from server import exit_codes
from server.cli.clean_exit import become, fail
from server.cli.console import logger_for
from server.cli.foreign_flags import all_advice
from server.config import ServerConfig
from server.http.key_file import check_access
from server.http.listener import ListenError, listen
from server.settings import CONFIG_VARIABLE, Setting, load, settings

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"YAML file of settings ({CONFIG_VARIABLE})"),
]

# The kernel limits a Unix socket's path to 107 bytes (103 on macOS). Penstock appends this suffix.
LONGEST_TMPDIR = 103 - len("/penstock-12345678/from_engine")


class Serve(TyperCommand):
    """A command whose help groups its options under headings."""

    meanings = exit_codes.MEANINGS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for param in self.get_params(ctx) for flag in param.opts}
        known |= {flag for param in self.get_params(ctx) for flag in param.secondary_opts}
        if text := all_advice(args, known):
            ctx.fail(text)
        return super().parse_args(ctx, spread(args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            heading = getattr(param, "rich_help_panel", None) or usual
            if record := param.get_help_record(ctx):
                panels.setdefault(heading, []).append(record)
        panels["Exit statuses"] = list(self.meanings.items())
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def option(setting: Setting) -> inspect.Parameter:
    """Return the command-line option of a setting.

    Its values stay strings, because `load` validates the values of every source.
    """
    kind: Any = list[str] if setting.repeats else bool if setting.is_switch else str
    default = f" (default: {setting.default_text})" if setting.default_text else ""
    source = f" ({setting.variable})" if setting.owner in (EngineConfig, ServerConfig) else ""
    flag = typer.Option(
        f"{setting.flag}/--no-{setting.flag[2:]}" if setting.is_switch else setting.flag,
        help=f"{setting.fact('description')}{default}{source}",
        metavar=None if setting.is_switch else "|".join(setting.choices) or "VALUE",
        rich_help_panel=setting.fact("title"),
        show_default=False,
    )
    return parameter(setting.name, Annotated[kind | None, flag])


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeat --lora-modules before each NAME=PATH behind the first, which vLLM's users expect."""
    flag = "--lora-modules"
    spread_out: list[str] = []
    is_list = False
    for argument in arguments:
        is_more = is_list and "=" in argument and not argument.startswith("-")
        if is_more and spread_out[-1] != flag:
            spread_out.append(flag)
        spread_out.append(argument)
        is_list = is_more or argument == flag
    return spread_out


def masked(arguments: Sequence[str]) -> list[str]:
    """Return a command line with *** in place of the values of secret flags."""
    secrets = tuple(setting.flag for setting in settings() if setting.marked("secret"))
    shown: list[str] = []
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if shown and shown[-1] in secrets:
            shown.append("***")
        else:
            shown.append(f"{flag}=***" if equals and flag in secrets else argument)
    return shown


def hide_secrets() -> None:
    """Mask the secrets on this process's command line, which every user of the machine can read."""
    shown = masked(sys.orig_argv)
    if shown != sys.orig_argv:
        from setproctitle import setproctitle  # it changes the memory of all arguments

        setproctitle(" ".join(shown))


def serve(**values: Any) -> None:
    """Serve MODEL over an OpenAI-compatible API."""
    hide_secrets()
    file = values.pop("config")
    only_plan = values.pop("plan")
    try:
        server_config, engine_config, warnings = load(with_model(values), os.environ, file)
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    from server.telemetry.logging import configure

    configure(server_config)
    fail_in_log = partial(fail, tell=logger_for(server_config, "error"))
    for warning in warnings:
        logger_for(server_config, "warning")(f"penstock: warning: {warning}")
    try:
        if not only_plan:
            check_access(server_config)
        server_config, engine_config = resolved(server_config, engine_config, only_plan)
        if only_plan:
            become("engine.offline.plan", msgspec.json.encode(engine_config).decode())
        check_temporary_folder()
        listener = listen(server_config)
    except ConfigError as error:
        raise fail_in_log(error, exit_codes.BAD_CONFIG) from None
    except ListenError as error:
        raise fail_in_log(error, exit_codes.CANNOT_LISTEN) from None
    # Not imported earlier, so that the errors above appear within 0.5 s.
    from engine.client.subprocess import EngineProcess

    with EngineProcess(engine_config) as child:  # it imports torch while we import the server
        with quick_imports():
            from engine.client.client import ProcessClient
            from server.cli.lifetime import run

        client = ProcessClient(engine_config, child)
        status = run(server_config, engine_config, client, listener)
    raise typer.Exit(status)


def with_model(values: dict[str, Any]) -> dict[str, Any]:
    """Take the argument MODEL as the value of --model. Raises typer.Exit if both are given."""
    argument = values.pop("folder")
    if argument is None:
        return values
    if values["model"] is not None:
        message = "The model was given twice; use either MODEL or --model."
        raise fail(message, exit_codes.BAD_CONFIG)
    return values | {"model": argument}


def resolved(
    server_config: ServerConfig, engine_config: EngineConfig, only_plan: bool
) -> tuple[ServerConfig, EngineConfig]:
    """Return both configurations with local model folders, whose files have been checked."""
    from server.cli.model_source import check_weights, resolve_model

    server_config, engine_config = resolve_model(
        server_config,
        engine_config,
        logger_for(server_config),
        weights=not only_plan,
        here=True,
    )
    if not only_plan:
        for model in (engine_config.model, engine_config.speculative_model):
            if model is not None:
                check_weights(engine_config, model_folder(model))
    return server_config, engine_config


def check_temporary_folder() -> None:
    """Raise ConfigError if the socket to the engine cannot be made in the temporary folder."""
    import tempfile

    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            "Penstock's two processes need a temporary folder for the socket between them: "
            f"{error.strerror}. Set TMPDIR to a folder that can be written; in a container, the "
            "cache mount."
        ) from None
    if len(os.fsencode(folder)) > LONGEST_TMPDIR:
        raise ConfigError(
            "The path of the temporary folder is too long for the socket between Penstock's two "
            f"processes: {folder} has {len(os.fsencode(folder))} bytes; the system allows "
            f"{LONGEST_TMPDIR} bytes. Set TMPDIR to a folder with a shorter name."
        )


# typer reads the options of a command from its signature, which is built from the settings here.
MODEL = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")]
OnlyPlan = Annotated[
    bool, typer.Option("--plan", help="Print how much memory serving takes, and load nothing.")
]
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        parameter("folder", MODEL),
        parameter("config", ConfigFile),
        parameter("plan", OnlyPlan),
        *map(option, settings()),
    ]
)
serve.__annotations__ = {}
