"""`penstock explain`: how each token of an answer was drawn, in the terminal."""

from __future__ import annotations

import functools
import inspect
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS
from server.cli.clean_exit import fail
from server.cli.console import say
from server.cli.short_commands import ApiKey, ServerUrl, own_key

if TYPE_CHECKING:  # `penstock --help` imports neither an HTTP client nor rich
    from rich.console import Console

    from server.cli.api_client import ApiClient

HEADERS = {"X-Penstock-UI": "1"}
MAX_TOKENS = 1024  # of an answer, explained by the server
# Fields of a request that no draw depends on.
OTHER_FIELDS = ("prompt", "return_token_ids", "max_tokens", "n", "logprobs", "prompt_logprobs")
Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer to explain: its tokens, and the sampling fields of its request."""

    prompt_ids: list[int]
    answer_ids: list[int]
    params: Json


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each parameter of PARAMETERS.

    The given ones become the command's argument `sampling`, by name.
    """

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        values = {name: given.pop(name) for name in PARAMETERS}
        command(sampling={n: value for n, value in values.items() if value is not None}, **given)

    own = inspect.signature(command, eval_str=True)
    options = [_option(name) for name in PARAMETERS]
    others = [each for name, each in own.parameters.items() if name != "sampling"]
    wrapped.__signature__ = own.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
    return wrapped


def _option(name: str) -> inspect.Parameter:
    parameter, kind = PARAMETERS[name], type(DEFAULTS[name])
    limits: dict[str, Any] = {"min": kind(parameter.least), "max": kind(parameter.most)}
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(help=parameter.meaning, **limits)],
    )


@with_sampling_options
def explain(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Answer PROMPT, and explain the answer.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--from", help="Explain an answer that --record has written.")
    ] = None,
    line: Annotated[int, typer.Option(min=1, help="Line of the answer in the file.")] = 1,
    token: Annotated[
        int | None, typer.Option(min=0, help="Show the candidates of this token, from 0.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, max=32, help="Candidates of a token.")] = 10,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT without a template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS)] = 32,
    seed: Annotated[int | None, typer.Option(help="Default: random.", show_default=False)] = None,
    url: ServerUrl = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's report.")] = False,
    *,
    sampling: dict[str, float],
) -> None:
    """Show how each token of an answer was drawn.

    The server computes the answer once more and repeats each draw. Its tokens are compared with the
    answer's.
    """
    from server.cli.api_client import ApiClient, ClientError
    from server.cli.servers import ServerChoiceError, default_url
    from server.replay.recorded import RecordError
    from server.replay.request import CannotReplay

    if (prompt is None) == (record is None):
        raise fail("Give a PROMPT, or a file of recorded answers with --from.", 2)
    try:
        address = default_url() if url is None else url
        with closing(ApiClient(address, own_key(api_key))) as client:
            facts = _get(client, "/ui/api/hello")
            if record is not None:
                answer = recorded_answer(record, line, facts["ready"]["vocab_size"])
            else:
                assert prompt is not None
                fields = {**sampling, "seed": secrets.randbits(52) if seed is None else seed}
                ids = _prompt(client, facts, prompt, raw=raw)
                answer = _answered(client, ids, max_tokens, fields)
            report = _explained(client, answer, candidates)
    except (ClientError, ServerChoiceError, RecordError, CannotReplay) as error:
        raise fail(error, 1) from None
    if token is not None and token >= len(report["tokens"]):
        raise fail(f"--token {token}: the answer has {len(report['tokens'])} tokens.", 2)
    if as_json:
        typer.echo(json.dumps(report))
        return
    from rich.console import Console

    show(report, token, Console(highlight=False))


def recorded_answer(file: Path, line: int, vocab_size: int) -> Answer:
    """Return the answer of a line. Raises RecordError or CannotReplay."""
    from server.replay.recorded import RecordError, read_record
    from server.replay.request import replay_body

    answers = read_record(file)
    if line not in answers:
        raise RecordError(f"{file} has no answer in line {line}; it has {len(answers)}.")
    recorded = answers[line]
    body = replay_body(recorded, vocab_size)
    params = {name: value for name, value in body.items() if name not in OTHER_FIELDS}
    return Answer(recorded.encoder_prompt_ids or recorded.prompt_ids, recorded.tokens, params)


def _get(client: ApiClient, path: str) -> Json:
    from server.cli.api_client import document

    with client.errors():
        response = client.http.get(path, headers=HEADERS)
    return document(response)


def _post(client: ApiClient, path: str, body: Json) -> Json:
    from server.cli.api_client import document

    with client.errors():
        response = client.http.post(path, json=body, headers=HEADERS)
    return document(response)


def _prompt(client: ApiClient, facts: Json, text: str, *, raw: bool) -> str | list[int]:
    """Return what the model continues: `text`, or a chat whose message it is."""
    if raw or not facts["has_template"]:
        return text
    body = {"messages": [{"role": "user", "content": text}]}
    rendered = _post(client, "/v1/chat/completions/render", body)
    ids: list[int] = rendered["token_ids"]
    return ids


def _answered(client: ApiClient, prompt: str | list[int], max_tokens: int, fields: Json) -> Answer:
    body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **fields}
    [choice] = _post(client, "/v1/completions", body)["choices"]
    return Answer(choice["prompt_token_ids"], choice["token_ids"], fields)


def _explained(client: ApiClient, answer: Answer, candidates: int) -> Json:
    if len(answer.answer_ids) > MAX_TOKENS:
        say(f"penstock: The first {MAX_TOKENS} of {len(answer.answer_ids)} tokens are explained.")
    body = {
        "prompt_ids": answer.prompt_ids,
        "answer_ids": answer.answer_ids[:MAX_TOKENS],
        "params": answer.params,
        "candidates": candidates,
    }
    return _post(client, "/ui/api/explain", body)


def show(report: Json, token: int | None, console: Console) -> None:
    """Print a report of /ui/api/explain: all tokens, or the candidates of one."""
    from rich.text import Text

    if token is None:
        console.print(_overview(report))
    else:
        _show_token(report, token, console)
    count = len(report["tokens"])
    if report["agrees"] is None:
        console.print(Text("The seed is not known, so the dice are not, either.", "yellow"))
    else:
        style = "green" if report["agrees"] == count else "yellow"
        console.print(Text(f"replay agrees {report['agrees']}/{count}", style))


def _overview(report: Json) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("#", "id"):
        table.add_column(heading, justify="right")
    table.add_column("token")
    for heading in ("raw", "final", "bits", "rank", "entropy", "kept", ""):
        table.add_column(heading, justify="right")
    for index, row in enumerate(report["tokens"]):
        token, rank, entropy, final_entropy, kept, mass, agrees, candidates, _ = row
        own = _candidate(candidates, token)
        bits = -math.log2(max(own[2], 2.0**-64))
        differs = Text("differs", "yellow") if agrees is False else Text("")
        table.add_row(
            str(index),
            str(token),
            Text(_shown(report, token), _colour(bits)),
            _percent(own[2]),
            _percent(_final(own, mass)),
            f"{bits:.2f}",
            str(rank),
            f"{entropy:.2f} > {final_entropy:.2f}",
            f"{kept:,}",
            differs,
        )
    return table


def _show_token(report: Json, index: int, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    token, rank, entropy, final_entropy, kept, mass, _, candidates, drawn = report["tokens"][index]
    facts = (
        f"token {index}: {_shown(report, token)}  id {token}  rank {rank}  "
        f"entropy {entropy:.2f} > {final_entropy:.2f} bits  kept {kept:,} ({_percent(mass)})"
    )
    console.print(Text(facts, "bold"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("token")
    for heading in ("logit", "raw", "penalties", "temperature", "cut", "final", "luck", "p/luck"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in candidates:
        name, logit, raw, adjusted, tempered, cut, luck = one
        final = _final(one, mass)
        kept_here = cut == 0
        table.add_row(
            Text(_shown(report, name), "" if kept_here else "dim"),
            f"{logit:.2f}",
            _percent(raw),
            _percent(adjusted),
            _percent(tempered),
            "" if kept_here else report["cuts"][cut],
            _percent(final) if kept_here else "",
            "" if luck is None else f"{luck:.3g}",
            "" if luck is None or not kept_here else f"{final / luck:.3g}",
            Text("won", "green") if name == drawn else Text(""),
        )
    console.print(table)


def _candidate(candidates: Sequence[list[Any]], token: int) -> list[Any]:
    return next(one for one in candidates if one[0] == token)


def _final(candidate: list[Any], mass: float) -> float:
    """Return the probability with which a candidate was drawn."""
    return float(candidate[4]) / mass if candidate[5] == 0 else 0.0


def _shown(report: Mapping[str, Any], token: int) -> str:
    """Return a token's text with visible white space."""
    from engine.errors import printable

    text = str(report["pieces"][str(token)])
    return printable(text.replace(" ", "·").replace("\n", "⏎")) or "∅"


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.0995 else 2}f} %"


def _colour(bits: float) -> str:
    return "yellow" if bits >= 4 else ""
