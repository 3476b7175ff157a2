"""The commands `penstock bench run` and `penstock bench compare`.

Only what `--help` needs is imported at the top, so that it is fast.
"""

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

# The options of `run`: typer reads their types and help texts from these annotations.
Url = Annotated[str, typer.Option(help="URL of the server, with or without /v1.")]
Concurrency = Annotated[
    str | None,
    typer.Option(metavar="1,8,32", help="Closed loops: numbers of clients, measured in turn."),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="2,4,120%",
        help="Open loops: requests/s, or with % a share of the rate that 64 clients reach.",
    ),
]
Workload = Annotated[
    str,
    typer.Option(
        help="Prompt/answer length in tokens; or `mix`: chats and code, some with shared prompts; "
        "or a file: a trace (Mooncake, Azure) or prompts.",
    ),
]
LengthScale = Annotated[
    str, typer.Option(metavar="0.01/0.2", help="Factors for a trace's prompt/answer lengths.")
]
Arrivals = Annotated[
    Literal["poisson", "recorded"],
    typer.Option(help="Arrivals of open loops; recorded: as in the trace, scaled to --rate."),
]
Slo = Annotated[
    str | None,
    typer.Option(
        metavar="ttft=500ms,itl=50ms", help="Goodput: limits a request must keep (also e2e=10s)."
    ),
]
Seconds = Annotated[float, typer.Option(help="Seconds per load.", min=0.1)]
Rounds = Annotated[int, typer.Option(help="Repetitions of all loads; medians are shown.", min=1)]
Seed = Annotated[int, typer.Option(help="The same seed repeats prompts and arrivals.")]
Model = Annotated[str | None, typer.Option(help="Default: the server's first model.")]
Key = Annotated[str | None, typer.Option(help="Default: $PENSTOCK_API_KEY.", show_default=False)]
Api = Annotated[Literal["chat", "completions"], typer.Option(help="Endpoint of the requests.")]
IgnoreEos = Annotated[
    bool, typer.Option(help="Request answers of full length; some servers do not support it.")
]
Timeout = Annotated[float, typer.Option(help="Time limit of a request in seconds.", min=0.1)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the figures to this file, for `compare`.")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="Write a page with charts to this file.")
]


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
    """Load a server and measure throughput and latency. Exit with 1 if a request failed.

    Without --concurrency and --rate, the loads are 1, 8 and 32 clients. Rejections (429, 503) are
    not failures. They are counted separately, with their own latency.
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
            raise BenchError(f"--json and --html are both {json_file}; give two different files.")
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
    for file, write in targets.items():  # before the table: stdout may be closed (`| head`)
        try:
            write(measured, file)
        except BenchError as error:
            status = max(status, _complain(error))
    typer.echo(report.table(measured))
    for note in report.notes(measured):
        typer.echo(note, err=not sys.stdout.isatty() and note.startswith("WARNING"))
    return status


async def _measure(asked: Asked, stops: list[int]) -> Report:
    """Measure until done or until a signal; the report has the loads that have ended.

    The number of the signal is appended to `stops`.
    """
    import asyncio

    from loadtest.session import measure

    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(number: int, frame: object) -> None:
        # `timeout` sends SIGTERM twice; the second must not end the process.
        if task and not task.done():
            stops.append(number)
            loop.call_soon_threadsafe(task.cancel)
        elif number == signal.SIGINT:  # while the files are written
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background jobs ignore SIGINT
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
    """Compare two runs side by side, load by load."""
    from loadtest import report

    try:
        typer.echo(report.compare(report.read(a), report.read(b)))
    except BenchError as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(2) from None
