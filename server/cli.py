"""The command `penstock`. Imports only what `--help` needs; each command imports its own work."""

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

from engine.command import standard_streams
from engine.config import DEMO_FOLDERS, model_folder
from engine.errors import ConfigError
from loadtest.cli import app as bench
from server import exits
from server.listen import ListenError, listen
from server.settings import CONFIG_VARIABLE, Setting, flags_page, load, settings
from server.voice import say, voice

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"YAML file with settings ({CONFIG_VARIABLE})"),
]

# The kernel allows a socket's path 107 bytes (103 on macOS); this one's ends so.
LONGEST_TMPDIR = 103 - len("/penstock-12345678/from_engine")


class Penstock(TyperGroup):
    """The command, from its first word of help on with standard streams as they should be."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with standard_streams():
            return super().main(*args, **kwargs)


class Serve(TyperCommand):
    """The command with many options: its help has them under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            heading = getattr(param, "rich_help_panel", None) or usual
            if record := param.get_help_record(ctx):
                panels.setdefault(heading, []).append(record)
        panels["Exit statuses"] = list(exits.MEANINGS.items())
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
app.add_typer(importing, name="import", help="Turn another program's checkpoint into a folder.")
app.add_typer(bench, name="bench", help="Load an OpenAI-compatible server and measure it.")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    # Without a handler, the first process of a container ignores SIGTERM.
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
    """Goes on as a process with torch: its output, its status and every signal are its own."""
    from engine.child import python_module

    command = [*python_module("engine.command"), module, *map(str, arguments)]
    # Python would tell of a Ctrl-C before that module is there to take it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(command[0], command)
    except OSError as error:  # the system bounds what a process may be given
        raise _fail(f"Cannot begin {module}: {error.strerror}", exits.BAD_CONFIG) from None


def _option(setting: Setting) -> inspect.Parameter:
    """One flag. Values stay text, so that only `load` validates and knows the source."""
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
            raise _fail("give the model once, as MODEL or as --model", exits.BAD_CONFIG)
        values["model"] = folder
    try:
        server_config, engine_config, warnings = load(values, os.environ, file)
    except ConfigError as error:
        raise _fail(error, exits.BAD_CONFIG) from None
    from server.logging import configure
    from server.model import check_weights, located

    configure(server_config)
    fail = partial(_fail, tell=voice(server_config, "error"))
    try:
        for warning in warnings:
            voice(server_config, "warning")(f"penstock: warning: {warning}")
        tell = voice(server_config)
        server_config, engine_config = located(
            server_config, engine_config, tell, weights=not only_plan, here=True
        )
        folder = model_folder(engine_config.model)
        if only_plan:
            _become("engine.plan", msgspec.json.encode(engine_config).decode())
        check_weights(engine_config, folder)
        _check_temporary_folder()
        listener = listen(server_config)
    except ConfigError as error:
        raise fail(error, exits.BAD_CONFIG) from None
    except ListenError as error:
        raise fail(error, exits.CANNOT_LISTEN) from None
    from engine.child import EngineChild  # only now: what is wrong so far is told within 0.5 s

    with EngineChild(engine_config) as child:  # it imports torch while we import the server
        from engine.client import ProcessClient
        from server.launch import run

        client = ProcessClient(engine_config, child)
        status = run(server_config, engine_config, client, listener)
    raise typer.Exit(status)


def _check_temporary_folder() -> None:
    import tempfile

    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no room for the socket between Penstock's two processes: {error.strerror}. "
            "Set TMPDIR to a folder that can be written, in a container the cache mount."
        ) from None
    if len(os.fsencode(folder)) > LONGEST_TMPDIR:
        raise ConfigError(
            f"The socket between Penstock's two processes cannot lie in {folder}: the system allows"
            f" {LONGEST_TMPDIR} bytes for that folder's name, not {len(os.fsencode(folder))}. "
            "Set TMPDIR to a folder with a shorter name."
        )


# typer reads the parameters of a command from its signature: here they are the fields.
MODEL = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")]
OnlyPlan = Annotated[
    bool, typer.Option("--plan", help="Print what it will take in memory, and load nothing.")
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
        str, typer.Option(help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Default: $PENSTOCK_API_KEY.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens in one answer.")] = None,
    quick: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this, print the answer, leave.")
    ] = None,
) -> None:
    """Chat with a running server; Ctrl-C stops an answer."""
    from server.chat import Chat, ChatError, converse

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
        Path, typer.Argument(help="A checkpoint folder (…/d20), or nanochat's base folder.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: nanochat-d20, after its model.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Default: the highest there is.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of tokenizer.pkl. Default: the base folder's.")
    ] = None,
) -> None:
    """A nanochat checkpoint of any generation. Nothing in its files is executed."""
    given = {"--out": out, "--step": step, "--tokenizer": tokenizer}
    options = [part for flag, value in given.items() if value is not None for part in (flag, value)]
    _become("engine.weights.nanochat.command", directory, *options)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; default: main.", show_default=False)
    ] = None,
) -> None:
    """Load a model from huggingface.co and print its folder. Weights come as safetensors, with
    what describes them; never code, pickles or GGUF."""
    try:
        from server.model import check_served
        from server.pull import pull as pull_now

        here = name in DEMO_FOLDERS  # they come with Penstock
        typer.echo(model_folder(name) if here else pull_now(name, revision, check_served))
    except ConfigError as error:
        raise _fail(error, exits.BAD_CONFIG) from None


@app.command()
def merge(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")],
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file in mergekit's vocabulary, instead of flags.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="linear, ema, slerp or liti.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Where slerp and liti begin; default: the first MODEL.")
    ] = None,
    weight: Annotated[
        list[float] | None, typer.Option(help="linear: one for each MODEL; default: equal.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="linear: whether weights are shares; default: yes.")
    ] = None,
    decay: Annotated[float | None, typer.Option(help="ema: share the average keeps.")] = None,
    t: Annotated[float | None, typer.Option(help="slerp, liti: 0 is the base model.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the result; default: what the base model has.")
    ] = None,
) -> None:
    """Merge model folders of one architecture into a new one."""
    from server.merge import recipe_of

    try:
        document = recipe_of(
            recipe, models or [], method, base_model, weight or [], dtype,
            t=t, decay=decay, normalize=normalize,
        )  # fmt: skip
        text = json.dumps(document, default=str)
    except ConfigError as error:
        raise _fail(error, exits.BAD_CONFIG) from None
    except (TypeError, ValueError) as error:  # YAML has circles, and keys that are no texts
        raise _fail(f"The recipe cannot be followed: {error}", exits.BAD_CONFIG) from None
    _become("engine.weights.merge", output, text)


@app.command()
def doctor(config: ConfigFile = None) -> None:
    """Check machine, versions, settings and model. Status 1 where something fails. Settings are
    those of the environment, and of a file."""
    from server.doctor import examine, render

    findings = examine(config, os.environ)
    typer.echo(render(findings))
    raise typer.Exit(int(any(finding.level == "fail" for finding in findings)))


@app.command()
def flags() -> None:
    """Print docs/flags.md: each setting, its flag, variable, default."""
    typer.echo(flags_page(), nl=False)
