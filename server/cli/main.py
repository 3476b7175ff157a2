"""The command `penstock`, and the list of its subcommands.

This module imports only what `--help` needs. Each command imports its implementation when it runs.
"""

from __future__ import annotations

import signal
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from loadtest.cli import app as bench
from server.cli import short_commands
from server.cli.clean_exit import standard_streams
from server.cli.compare import compare
from server.cli.doctor_command import Doctor, doctor
from server.cli.explain import explain
from server.cli.launch_command import launch
from server.cli.run_batch import RunBatch, run_batch
from server.cli.serve import Serve, serve
from server.cli.serve_models import serve_models
from server.cli.verify import Verify, verify


class Penstock(TyperGroup):
    """A command group that sets up the standard streams before it runs or prints help."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with standard_streams():
            return super().main(*args, **kwargs)


app = typer.Typer(
    name="penstock",
    cls=Penstock,
    help="A glass-box model server: one command turns a checkpoint into an OpenAI-compatible API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
importing = typer.Typer(no_args_is_help=True)
importing.command()(short_commands.nanochat)
app.command(cls=Serve)(serve)
app.command(name="serve", cls=Serve)(serve_models)
app.command()(short_commands.run)
app.command()(short_commands.chat)
app.command()(launch)
app.command(name="open")(short_commands.open_pages)
app.command()(short_commands.inspect)
app.command()(short_commands.top)
app.command()(explain)
app.command(cls=RunBatch)(run_batch)
app.command(name="list")(short_commands.list_models)
app.command()(short_commands.pull)
app.command()(short_commands.ps)
app.command()(short_commands.stop)
app.command(cls=Doctor)(doctor)
app.command()(short_commands.flags)
app.command()(short_commands.api)
app.command()(short_commands.merge)
app.command()(short_commands.quantize)
app.command(cls=Verify)(verify)
app.command()(compare)
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
    # The terminal is gone: `penstock run` then ends its server. nohup ignores the signal.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
