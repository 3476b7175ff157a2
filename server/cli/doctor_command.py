"""`penstock doctor`, with the flags of `penstock serve`: they change what it finds."""

from __future__ import annotations

import inspect
import os
from typing import Any

import typer

from server.cli.serve import (
    MODEL,
    ConfigFile,
    Serve,
    hide_secrets,
    option,
    parameter,
    with_model,
)
from server.settings import settings


class Doctor(Serve):
    """A command with the options of `serve`, and exit statuses of its own."""

    meanings = {"0": "No check failed.", "1": "A check failed."}  # noqa: RUF012


def doctor(**values: Any) -> None:
    """Check the machine, versions, settings and model. Exits with status 1 if a check fails.
    Give it the flags of `penstock serve`, or its environment and file."""
    hide_secrets()
    from server.cli.doctor import examine, render

    config = values.pop("config")
    findings = examine(config, os.environ, with_model(values))
    typer.echo(render(findings))
    raise typer.Exit(int(any(finding.level == "fail" for finding in findings)))


doctor.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [parameter("folder", MODEL), parameter("config", ConfigFile), *map(option, settings())]
)
doctor.__annotations__ = {}
