"""The commands `penstock bench run` and `penstock bench compare`. Imports only what `--help`
needs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from loadtest.report import Report
    from loadtest.session import Asked

app = typer.Typer(no_args_is_help=True)

# The options of `run`, of which typer reads the type and the text here.
Url = Annotated[str, typer.Option(help="The server, with or without /v1.")]
Concurrency = Annotated[
    str | None,
    typer.Option(metavar="1,8,32", help="Closed loop: so many clients at a time, in turn."),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="2,4,120%",
        help="Open loop: so many requests/s, in turn; with %, of what 64 clients reach.",
    ),
]
Workload = Annotated[
    str,
    typer.Option(
        help="Tokens of prompt/answer; or `mix`: chats and code, some prompts shared; or the "
        "file of a trace (Mooncake, Azure) or of prompts.",
    ),
]
LengthScale = Annotated[
    str, typer.Option(metavar="0.01/0.2", help="A trace's prompts and answers, times this.")
]
Arrivals = Annotated[
    Literal["poisson", "recorded"],
    typer.Option(help="Of an open loop; recorded: the trace's, at the rate given."),
]
Slo = Annotated[
    str | None,
    typer.Option(
        metavar="ttft=500ms,itl=50ms", help="What a good request keeps (also e2e=10s): goodput."
    ),
]
Seconds = Annotated[float, typer.Option(help="Of each load.", min=0.1)]
Rounds = Annotated[int, typer.Option(help="All loads so often; medians are shown.", min=1)]
Seed = Annotated[int, typer.Option(help="Same seed, same prompts and arrivals.")]
Model = Annotated[str | None, typer.Option(help="Default: the server's first model.")]
Key = Annotated[str | None, typer.Option(help="Default: $PENSTOCK_API_KEY.", show_default=False)]
Api = Annotated[Literal["chat", "completions"], typer.Option(help="What is asked of the server.")]
IgnoreEos = Annotated[
    bool, typer.Option(help="Ask for answers of full length; not every server can.")
]
Timeout = Annotated[float, typer.Option(help="Seconds a request may take.", min=0.1)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the figures here, for `compare`.")
]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page with curves here.")]


@app.command()
def run(
    url: Url = "http://127.0.0.1:8000",
    concurrency: Concurrency = None,
    rate: Rate = None,
    workload: Workload = "128/64",
    length_scale: LengthScale = "1",
    arrivals: Arrivals = "poisson",
    slo: Slo = None,
    seconds: Seconds = 20.0,
    rounds: Rounds = 1,
    seed: Seed = 0,
    model: Model = None,
    api_key: Key = None,
    api: Api = "chat",
    ignore_eos: IgnoreEos = True,
    timeout: Timeout = 300.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Load a server and tell what its users would feel. Status 1 where a request failed.

    Without --concurrency and --rate: 1, 8 and 32 clients. Rejections (429, 503) are no failures:
    they are counted, with their own latency.
    """
    from loadtest.session import Asked

    asked = Asked(
        url=url,
        key=api_key or os.environ.get("PENSTOCK_API_KEY", "").partition(",")[0],
        model=model,
        api=api,
        concurrency=concurrency or ("" if rate else "1,8,32"),
        rate=rate or "",
        workload=workload,
        length_scale=length_scale,
        arrivals=arrivals,
        slo=slo,
        seconds=seconds,
        rounds=rounds,
        seed=seed,
        ignore_eos=ignore_eos,
        timeout=timeout,
    )
    raise typer.Exit(_run(asked, json_file, html_file))


def _run(asked: Asked, json_file: Path | None, html_file: Path | None) -> int:
    import asyncio

    from loadtest import html_page, report

    stops: list[int] = []
    writers = {json_file: report.write, html_file: html_page.write}
    targets = {file: write for file, write in writers.items() if file}
    try:
        if json_file and json_file == html_file:
            raise BenchError(f"--json and --html are both {json_file}: one would be lost.")
        for file in targets:
            report.check_target(file)
        measured = asyncio.run(_measure(asked, stops))
    except BenchError as error:
        return _complain(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 128 + (stops or [signal.SIGINT])[0]
    status = int(bool(measured.stopped) or any(point.failed for point in measured.points))
    if measured.stopped and stops:
        status = 128 + stops[0]
    for file, write in targets.items():  # before the table, whose reader may be gone (`| head`)
        try:
            write(measured, file)
        except BenchError as error:
            status = max(status, _complain(error))
    typer.echo(report.table(measured))
    for note in report.notes(measured):
        typer.echo(note, err=not sys.stdout.isatty() and note.startswith("WARNING"))
    return status


async def _measure(asked: Asked, stops: list[int]) -> Report:
    """A signal, which is noted in `stops`, ends it early: what has ended is kept."""
    import asyncio

    from loadtest.session import measure

    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(number: int, frame: object) -> None:
        if task and not task.done():  # `timeout` sends it twice: the second is not to end us
            stops.append(number)
            loop.call_soon_threadsafe(task.cancel)
        elif number == signal.SIGINT:  # while the files are written
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a shell's background
            signal.signal(number, stop)
    return await measure(asked)


def _complain(error: Exception) -> int:
    typer.echo(f"penstock: {error}", err=True)
    return 1


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json")],
    b: Annotated[Path, typer.Argument(metavar="B.json")],
) -> None:
    """Two runs side by side, load by load."""
    from loadtest import report

    try:
        typer.echo(report.compare(report.read(a), report.read(b)))
    except BenchError as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(2) from None
