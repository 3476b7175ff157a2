"""`penstock verify`: replay the answers of a file of --record, and report what differs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import printable
from server.cli.clean_exit import STOPPED, fail, run_until_stopped
from server.cli.console import say, visible
from server.cli.serve import Serve

if TYPE_CHECKING:  # `penstock --help` imports no HTTP client
    from server.replay.recorded import RecordedAnswer
    from server.replay.verify import Difference, Plan, Report

EQUAL, DIFFERENT, CANNOT_VERIFY, SERVER_AWAY = 0, 1, 2, 3
MEANINGS = {
    "0": "Every recorded answer was replayed, and all tokens were equal.",
    "1": "A replayed answer has another token.",
    "2": "The file, the flags, or the server's model or key do not allow a replay of all answers.",
    "3": "The server cannot be reached.",
    "130, 143": "Stopped by SIGINT or SIGTERM.",
}
SHOWN = 20  # differences and refusals that are printed for people


class Verify(Serve):
    """A command whose help shows its exit statuses."""

    meanings = MEANINGS


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written by --record.")],
    url: Annotated[
        str | None,
        typer.Option(help="Default: port 8000, or the only running server.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds in random company.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random orders.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 16,
    api_key: Annotated[
        str | None, typer.Option(help="Default: $PENSTOCK_API_KEY.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Replay recorded answers and compare their tokens.

    Each request is sent alone, then in random order with others. Its answer must not depend on
    them.
    """
    from server.cli.servers import ServerChoiceError, default_url
    from server.replay.recorded import RecordError, read_record
    from server.replay.verify import Plan

    key = api_key or os.environ.get("PENSTOCK_API_KEY", "").partition(",")[0]
    try:
        answers = read_record(file)
        address = default_url() if url is None else url
    except (RecordError, ServerChoiceError) as error:
        raise fail(error, CANNOT_VERIFY) from None
    report = _verified(address, key, answers, Plan(rounds, seed, concurrency), quiet=as_json)
    show = _print_json if as_json else _print_text
    show(report, answers)
    raise typer.Exit(_status(report))


def _verified(
    url: str, key: str, answers: dict[int, RecordedAnswer], plan: Plan, *, quiet: bool
) -> Report:
    """Return the report of all rounds. Raises typer.Exit."""
    from server.cli.api_client import ClientError, async_client
    from server.replay.client import Refused, ReplayClient
    from server.replay.recorded import REPLAY_HEADER
    from server.replay.verify import CannotVerify, Verification
    from server.sender import ServerAway

    reports: list[Report] = []

    async def work() -> None:
        headers = {REPLAY_HEADER: "1"}
        async with async_client(url, key, plan.concurrency, headers) as http:
            api = ReplayClient(http)
            with _progress(len(answers), plan.rounds, quiet=quiet) as seen:
                reports.append(await Verification(api, answers, plan, seen).run())

    try:
        run_until_stopped(work())
    except ServerAway as error:
        raise fail(f"{url}: {error}", SERVER_AWAY) from None
    except ClientError as error:
        raise fail(error, CANNOT_VERIFY) from None
    except (CannotVerify, Refused) as error:
        raise fail(f"{url}: {error}", CANNOT_VERIFY) from None
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    return reports[0]


@contextlib.contextmanager
def _progress(total: int, rounds: int, *, quiet: bool) -> Iterator[Callable[[Report], None]]:
    """Yield a function that shows how many replays are done, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda report: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("alone", total=total * (rounds + 1))

        def seen(report: Report) -> None:
            number = report.sent // max(1, total - len(report.refusals))
            words = "alone" if number == 0 else f"random order {min(number, rounds)}"
            if report.differences:
                words += f", {len(report.differences)} differ"
            bar.update(task, description=words, completed=report.sent)

        yield seen


def _status(report: Report) -> int:
    if report.differences:
        return DIFFERENT
    return CANNOT_VERIFY if report.refusals else EQUAL


def _print_json(report: Report, answers: dict[int, RecordedAnswer]) -> None:
    for line, difference in sorted(report.differences.items()):
        fields = {"event": "difference", "id": answers[line].id, "choice": answers[line].choice}
        typer.echo(json.dumps(fields | dataclasses.asdict(difference)))
    for line, reason in sorted(report.refusals.items()):
        fields = {"event": "refused", "id": answers[line].id, "choice": answers[line].choice}
        typer.echo(json.dumps(fields | {"line": line, "reason": reason}))
    summary = {
        "event": "summary",
        "recorded": report.total,
        "equal": report.equal,
        "different": len(report.differences),
        "refused": len(report.refusals),
        "replays": report.sent,
        "batch_invariant": report.batch_invariant,
    }
    typer.echo(json.dumps(summary))


def _print_text(report: Report, answers: dict[int, RecordedAnswer]) -> None:
    for line, difference in sorted(report.differences.items())[:SHOWN]:
        typer.echo(visible(_described(difference, answers[line])))
    for line, reason in sorted(report.refusals.items())[:SHOWN]:
        typer.echo(printable(f"line {line} ({answers[line].id}): not verified: {reason}"))
    hidden = max(0, len(report.differences) - SHOWN) + max(0, len(report.refusals) - SHOWN)
    if hidden:
        typer.echo(f"and {hidden} more; --json prints all")
    refused = f", {len(report.refusals)} not verified" if report.refusals else ""
    typer.echo(
        f"{report.equal} of {report.total} recorded answers equal, {len(report.differences)} "
        f"different{refused}; {report.sent} replays"
    )
    if not report.batch_invariant:
        say(
            "penstock: this server says that the last bits of its logits depend on the other "
            "requests in a step, so tokens can differ; its banner says what prevents it."
        )


def _described(found: Difference, recorded: RecordedAnswer) -> str:
    """Return two lines about one difference."""
    where = "alone" if found.round == 0 else f"in random order {found.round}"
    company = f", with {len(found.company)} others in flight" if found.company else ""
    return (
        f"line {found.line} ({recorded.id}, choice {recorded.choice}): token {found.index} "
        f"differs {where}{company}\n"
        f"  after {found.before!r}: expected {_token(found.expected, found.expected_text)}, "
        f"got {_token(found.got, found.got_text)}"
    )


def _token(token: int | None, text: str) -> str:
    return "the end" if token is None else f"{token} {text!r}"
