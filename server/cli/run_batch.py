"""`penstock run-batch`: answer the lines of a file, with an engine of its own or by a server."""

from __future__ import annotations

import contextlib
import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.config import EngineConfig
from engine.errors import ConfigError
from server import exit_codes
from server.cli.clean_exit import STOPPED, fail, run_until_stopped
from server.cli.console import say
from server.cli.serve import ConfigFile, Serve, check_temporary_folder, option, parameter, resolved
from server.config import ServerConfig
from server.settings import load, settings

CONCURRENCY = 32  # open lines of --url
PATIENCE_S = 60.0  # that the server of --url may be away, for a restart
USED = ("served_model_name", "chat_template", "max_body_bytes", "strict_max_tokens")
MEANINGS = {
    "0": "Every line has an answer.",
    "1": "Lines have failed, or the server of --url is away. The same command continues.",
    "2": "A flag, environment variable, file or model is not valid.",
    "3": "The engine process died. The same command continues.",
    "130, 143": "Stopped by SIGINT or SIGTERM. The same command continues.",
}


class RunBatch(Serve):
    """A command whose help groups its options under headings."""

    meanings = MEANINGS


def run_batch(**values: Any) -> None:
    """Answer a file of requests in OpenAI's batch format.

    The answers are written to OUTPUT, the failures to --errors. The same command continues after
    an interruption.
    """
    from server.batch.job import Job, JobError, JobFiles

    source = values.pop("input")
    output: Path = values.pop("output")
    errors = values.pop("errors") or output.with_name(f"{output.stem}.errors{output.suffix}")
    url = values.pop("url")
    key = values.pop("api_key") or os.environ.get("PENSTOCK_API_KEY", "").partition(",")[0]
    concurrency = values.pop("concurrency")
    server_config, engine_config = _loaded(values, url)
    try:
        job = Job(JobFiles(source, output, errors), server_config.max_body_bytes)
    except JobError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    status: Any = exit_codes.CLEAN
    with contextlib.closing(job):
        try:
            if not job.is_done and url is not None:
                status = _run_by_server(job, url, key, concurrency)
            elif not job.is_done:
                status = _run_by_engine(job, server_config, engine_config, concurrency)
        except (KeyboardInterrupt, SystemExit) as stop:  # SIGINT, SIGTERM
            say(f"penstock: stopped at {job.summary}; the same command continues.")
            status = STOPPED if isinstance(stop, KeyboardInterrupt) else stop.code
            raise typer.Exit(status) from None
        except OSError as error:
            raise fail(f"The results cannot be written: {error.strerror}.", 1) from None
        if status == exit_codes.CLEAN:
            say(f"penstock: {job.summary}: {output}" + f", {errors}" * bool(job.results.failed))
            status = int(bool(job.results.failed))
    raise typer.Exit(status)


def _loaded(values: dict[str, Any], url: str | None) -> tuple[ServerConfig, EngineConfig]:
    """Return the configurations. Raises typer.Exit."""
    file = values.pop("config")
    model = values.pop("model_argument")
    given = {name: value for name, value in values.items() if value not in (None, [])}
    if url is not None and (model is not None or given):
        raise fail("--url names a server, which has a model and settings.", exit_codes.BAD_CONFIG)
    if model is not None and values["model"] is not None:
        raise fail("The model was given twice; use either MODEL or --model.", exit_codes.BAD_CONFIG)
    if model is not None:
        values["model"] = model
    try:
        server_config, engine_config, warnings = load(values, os.environ, file)
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    for warning in warnings:
        say(f"penstock: warning: {warning}")
    return server_config, engine_config


def _run_by_engine(
    job: Any, server_config: ServerConfig, engine_config: EngineConfig, concurrency: int | None
) -> int:
    """Start an engine for this job, and return the exit status."""
    try:
        server_config, engine_config = resolved(server_config, engine_config, only_plan=False)
        check_temporary_folder()
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    from engine.client.subprocess import EngineProcess

    with EngineProcess(engine_config) as child:  # it imports torch while we import the server
        from engine.client.client import ProcessClient
        from server.cli.engine_batch import run_with_engine

        client = ProcessClient(engine_config, child)
        return run_with_engine(job, server_config, engine_config, client, concurrency, say)


def _run_by_server(job: Any, url: str, key: str, concurrency: int | None) -> int:
    """Send the lines to a running server, and return the exit status."""
    import httpx2

    from server.cli.api_client import ClientError, async_client
    from server.sender import Sender, ServerAway

    open_lines = concurrency or CONCURRENCY

    async def work() -> None:
        async with async_client(url, key, open_lines) as http:
            response = await http.get("/v1/models")
            if response.status_code == 401:
                raise ServerAway("The server wants another key: set --api-key.")
            await job.run(Sender(http, PATIENCE_S), open_lines, say)

    try:
        run_until_stopped(work())
    except (httpx2.HTTPError, ClientError, ServerAway) as error:
        say(f"penstock: {url}: {error} {job.summary} have a result; the same command continues.")
        return 1
    return exit_codes.CLEAN


Source = Annotated[
    Path, typer.Argument(metavar="INPUT", help="Lines with custom_id, method, url and body.")
]
Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="As for `penstock serve`; not with --url.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="File of the answers, one per line.")]
Errors = Annotated[
    Path | None,
    typer.Option(help="File of the failed lines. Default: OUTPUT with .errors before its suffix."),
]
Url = Annotated[
    str | None, typer.Option(help="Send the lines to this server, instead of starting an engine.")
]
ApiKey = Annotated[str | None, typer.Option(help="For --url. Default: $PENSTOCK_API_KEY.")]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Most open lines. Default: what fills the engine; {CONCURRENCY} with --url."
    ),
]


def _required(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


def _used_settings() -> list[inspect.Parameter]:
    """Return the options that matter without a port."""
    found = []
    for setting in settings():
        if setting.owner is EngineConfig or setting.name in USED:
            found.append(option(setting))
    return found


run_batch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        _required("input", Source),
        parameter("model_argument", Model),
        _required("output", Output),
        parameter("errors", Errors),
        parameter("url", Url),
        parameter("api_key", ApiKey),
        parameter("concurrency", Concurrency),
        parameter("config", ConfigFile),
        *_used_settings(),
    ]
)
run_batch.__annotations__ = {}
