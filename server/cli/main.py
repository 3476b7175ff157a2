"""The command `penstock`.

This module imports only what `--help` needs. Each command imports its implementation when it runs.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from engine.checkpoint.folder import DEMO_FOLDERS, model_folder
from engine.errors import ConfigError
from loadtest.cli import app as bench
from server.cli import exit_codes
from server.cli.command import standard_streams
from server.cli.console import logger_for, say
from server.cli.settings import CONFIG_VARIABLE, Setting, flags_page, load, settings
from server.http.listener import ListenError, listen

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"YAML file of settings ({CONFIG_VARIABLE})"),
]

# The kernel limits a Unix socket's path to 107 bytes (103 on macOS). Penstock appends this suffix.
LONGEST_TMPDIR = 103 - len("/penstock-12345678/from_engine")


class Penstock(TyperGroup):
    """A command group that sets up the standard streams before it runs or prints help."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with standard_streams():
            return super().main(*args, **kwargs)


class Serve(TyperCommand):
    """A command whose help groups its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            heading = getattr(param, "rich_help_panel", None) or usual
            if record := param.get_help_record(ctx):
                panels.setdefault(heading, []).append(record)
        panels["Exit statuses"] = list(exit_codes.MEANINGS.items())
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)


app = typer.Typer(
    name="penstock",
    cls=Penstock,
    help="A glass-box model server: one command turns a checkpoint into an OpenAI-compatible API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
importing = typer.Typer(no_args_is_help=True)
app.add_typer(importing, name="import", help="Convert another program's checkpoint.")
app.add_typer(bench, name="bench", help="Measure an OpenAI-compatible server under load.")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    # The first process of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _fail(message: object, status: int, tell: Callable[[str], None] = say) -> typer.Exit:
    tell(f"penstock: {message}")
    return typer.Exit(status)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _become(module: str, *arguments: object) -> NoReturn:
    """Replace this process with one that runs `module`, which may import torch.

    The new process has the same output, receives the signals and returns its own exit status.
    """
    from engine.client.subprocess import python_module

    command = [*python_module("server.cli.command"), module, *map(str, arguments)]
    # A Ctrl-C before `module` can handle it would make Python print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(command[0], command)
    except OSError as error:  # the system limits the size of a process's arguments
        raise _fail(f"Cannot start {module}: {error.strerror}", exit_codes.BAD_CONFIG) from None


def _option(setting: Setting) -> inspect.Parameter:
    """Return the command-line option of a setting.

    Its values stay strings, because `load` validates the values of every source.
    """
    kind: Any = list[str] if setting.repeats else bool if setting.is_switch else str
    default = f" (default: {setting.default_text})" if setting.default_text else ""
    option = typer.Option(
        f"{setting.flag}/--no-{setting.flag[2:]}" if setting.is_switch else setting.flag,
        help=f"{setting.fact('description')}{default} ({setting.variable})",
        metavar=None if setting.is_switch else "|".join(setting.choices) or "VALUE",
        rich_help_panel=setting.fact("title"),
        show_default=False,
    )
    return _parameter(setting.name, Annotated[kind | None, option])


def serve(**values: Any) -> None:
    """Serve MODEL over an OpenAI-compatible API."""
    folder, file, only_plan = (values.pop(name) for name in ("folder", "config", "plan"))
    if folder is not None:
        if values["model"] is not None:
            raise _fail(
                "The model was given twice; use either MODEL or --model.", exit_codes.BAD_CONFIG
            )
        values["model"] = folder
    try:
        server_config, engine_config, warnings = load(values, os.environ, file)
    except ConfigError as error:
        raise _fail(error, exit_codes.BAD_CONFIG) from None
    from server.cli.model_source import check_weights, resolve_model
    from server.telemetry.logging import configure

    configure(server_config)
    fail = partial(_fail, tell=logger_for(server_config, "error"))
    try:
        for warning in warnings:
            logger_for(server_config, "warning")(f"penstock: warning: {warning}")
        tell = logger_for(server_config)
        server_config, engine_config = resolve_model(
            server_config, engine_config, tell, weights=not only_plan, here=True
        )
        folder = model_folder(engine_config.model)
        if only_plan:
            _become("engine.memory.command", msgspec.json.encode(engine_config).decode())
        check_weights(engine_config, folder)
        _check_temporary_folder()
        listener = listen(server_config)
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    except ListenError as error:
        raise fail(error, exit_codes.CANNOT_LISTEN) from None
    from engine.client.subprocess import (
        EngineProcess,  # not earlier, so that errors above appear within 0.5 s
    )

    with EngineProcess(engine_config) as child:  # it imports torch while we import the server
        from engine.client.client import ProcessClient
        from server.lifetime import run

        client = ProcessClient(engine_config, child)
        status = run(server_config, engine_config, client, listener)
    raise typer.Exit(status)


def _check_temporary_folder() -> None:
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
        _parameter("folder", MODEL),
        _parameter("config", ConfigFile),
        _parameter("plan", OnlyPlan),
        *map(_option, settings()),
    ]
)
serve.__annotations__ = {}
app.command(cls=Serve)(serve)


@app.command()
def chat(
    url: Annotated[
        str, typer.Option(help="URL of the server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Default: $PENSTOCK_API_KEY.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens in an answer.")] = None,
    quick: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Send TEXT, print the answer and exit.")
    ] = None,
) -> None:
    """Chat with a running server. Ctrl-C stops an answer."""
    from server.cli.chat import Chat, ChatError, converse

    key = api_key or os.environ.get("PENSTOCK_API_KEY", "").partition(",")[0]
    options = {"temperature": temperature, "max_tokens": max_tokens}
    try:
        partner = Chat(url, key, model, system, **options)
    except ChatError as error:
        raise _fail(error, 1) from None
    with closing(partner):
        raise typer.Exit(converse(partner, quick))


@importing.command()
def nanochat(
    directory: Annotated[
        Path, typer.Argument(help="A checkpoint folder (…/d20) or nanochat's base folder.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: nanochat-TAG.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Default: the highest step.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of tokenizer.pkl. Default: in the base folder.")
    ] = None,
) -> None:
    """Convert a nanochat checkpoint of any version. Code in its files is never executed."""
    given = {"--out": out, "--step": step, "--tokenizer": tokenizer}
    options = [part for flag, value in given.items() if value is not None for part in (flag, value)]
    _become("engine.checkpoint.nanochat.command", directory, *options)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; default: main.", show_default=False)
    ] = None,
) -> None:
    """Download a model from huggingface.co and print its folder. Only safetensors weights, the
    tokenizer and configuration files are downloaded; never code, pickles or GGUF."""
    try:
        from server.cli.model_source import check_served
        from server.cli.pull import pull as pull_now

        here = name in DEMO_FOLDERS  # these ship with Penstock
        typer.echo(model_folder(name) if here else pull_now(name, revision, check_served))
    except ConfigError as error:
        raise _fail(error, exit_codes.BAD_CONFIG) from None


@app.command()
def merge(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to create.")],
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file in mergekit's format, instead of flags.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="linear, ema, slerp or liti.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="slerp, liti: model at t = 0; default: the first MODEL.")
    ] = None,
    weight: Annotated[
        list[float] | None, typer.Option(help="linear: one per MODEL; default: equal weights.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="linear: divide weights by their sum; default: yes.")
    ] = None,
    decay: Annotated[float | None, typer.Option(help="ema: weight of the running average.")] = None,
    t: Annotated[float | None, typer.Option(help="slerp, liti: 0 is the base model.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the result; default: the base model's.")
    ] = None,
) -> None:
    """Merge models of one architecture into a new model folder."""
    from server.cli.merge import recipe_of

    try:
        document = recipe_of(
            recipe, models or [], method, base_model, weight or [], dtype,
            t=t, decay=decay, normalize=normalize,
        )  # fmt: skip
        text = json.dumps(document, default=str)
    except ConfigError as error:
        raise _fail(error, exit_codes.BAD_CONFIG) from None
    except (TypeError, ValueError) as error:  # circular references, or keys that are no strings
        raise _fail(f"The recipe is not valid: {error}", exit_codes.BAD_CONFIG) from None
    _become("engine.checkpoint.merge.merge", output, text)


@app.command()
def doctor(config: ConfigFile = None) -> None:
    """Check the machine, versions, settings and model. Exits with status 1 if a check fails.
    Settings come from the environment and from a file."""
    from server.cli.doctor import examine, render

    findings = examine(config, os.environ)
    typer.echo(render(findings))
    raise typer.Exit(int(any(finding.level == "fail" for finding in findings)))


@app.command()
def flags() -> None:
    """Print docs/flags.md: flag, variable and default of settings."""
    typer.echo(flags_page(), nl=False)
