"""`penstock inspect`: the waterfall of a request, or the tokens of a prompt, in the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.errors import printable
from server.cli.api_client import ApiClient, check

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OWN_ID = re.compile(r"req_[0-9a-f]{32}")  # an id that the server has made
HEADERS = {"X-Penstock-UI": "1"}
BAR = 40  # characters of the whole wall time
ROUGH_R2 = 0.8  # below it, the split by the step model is rough
ROUGH_STEPS = 20  # with fewer it is rough, too
MOST_COSTS = 8  # other requests that are shown
STYLES = {
    "server": "blue",
    "queue": "yellow",
    "encoder": "bright_yellow",
    "base": "cyan",
    "own": "green",
    "others": "magenta",
    "waiting": "red",
    "unexplained": "dim",
}
Json = Mapping[str, Any]


def show(client: ApiClient, text: str, console: Console | None = None) -> None:
    """Print what the server knows about a request id or a prompt. Raises ClientError."""
    if console is None:
        console = Console(highlight=False)
    if REQUEST_ID.fullmatch(text):
        with client.errors():
            response = client.http.get(f"/ui/api/requests/{text}", headers=HEADERS)
        if response.status_code != 404 or OWN_ID.fullmatch(text):
            check(response)
            show_waterfall(response.json(), console)
            return
    body = {"messages": [{"role": "user", "content": text}]}
    with client.errors():
        response = client.http.post("/v1/chat/completions/render", json=body)
    check(response)
    show_prompt(response.json(), console)


def show_waterfall(report: Json, console: Console) -> None:
    """Print the answer of GET /ui/api/requests/{id}."""
    outcome = report["state"] if report["error"] is None else f"aborted: {report['error']}"
    console.print(Text(f"{report['id']}  {duration(report['wall_ms'])}, {outcome}", "bold"))
    console.print(_parts(report))
    for line in _stages(report):
        console.print(Text(line))
    if report["who"]:
        console.print()
        console.print(_costs(report["who"]))
    console.print()
    console.print(Text(fit_line(report["fit"]), "dim"))


def _parts(report: Json) -> Table:
    """Return the parts below each other, each bar beginning where the last one ended."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    wall, before = report["wall_ms"], 0.0
    has_images = any(choice["images"] for choice in report["choices"])
    for name, part in report["parts"].items():
        if name == "encoder" and not has_images:
            continue
        begin = round(BAR * before / wall) if wall else 0
        before += max(part, 0.0)
        end = round(BAR * before / wall) if wall else 0
        filled = min(end, BAR) - min(begin, BAR)
        if part > 0 and not filled:
            bar = Text(" " * min(begin, BAR - 1) + "▏", STYLES[name])
        else:
            bar = Text(" " * begin + "█" * filled, STYLES[name])
        shown = "waiting for a core" if name == "waiting" else name
        table.add_row(shown, duration(part), bar)
    return table


def _images_line(images: Json) -> str:
    """Return what the encoder did for a choice: "2 images encoded in 340 ms, 1 reused"."""
    encoded, reused = images["encoded"], images["reused"]
    parts = []
    if encoded:
        noun = "image" if encoded == 1 else "images"
        parts.append(f"{encoded} {noun} encoded in {duration(images['encode_ms'])}")
    if reused:
        noun = "" if encoded else " image" if reused == 1 else " images"
        parts.append(f"{reused}{noun} reused")
    return ", ".join(parts)


def _stages(report: Json) -> Iterator[str]:
    """Yield one line for each choice: what it went through, and when."""
    choices = report["choices"]
    for choice in choices:
        which = f"choice {choice['index']}: " if len(choices) > 1 else ""
        prompt = f"{choice['prompt_tokens']} prompt tokens, {choice['cached_tokens']} cached"
        stages = [prompt]
        if choice["admitted"] is None:
            stages.append("never left the queue")
        else:
            stages.append(f"admitted at {duration(choice['admitted'])}")
        if choice["images"]:
            stages.append(_images_line(choice["images"]))
        counts = [str(count) for *_, count in choice["prefills"]]
        if counts:
            stages.append(f"prefill {' + '.join(counts)}")
        if choice["preemptions"]:
            stages.append(f"preempted {choice['preemptions']} times")
        if choice["first_token"] is not None:
            stages.append(f"first token at {duration(choice['first_token'])}")
            stages.append(f"{choice['generated_tokens']} tokens")
        stages.append(f"finish: {choice['finish'] or 'none'}")
        yield which + "; ".join(stages)


def _costs(who: Sequence[Sequence[Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("who cost what")
    for heading in ("prompt", "decodes", "in its steps", "in the queue"):
        table.add_column(heading, justify="right")
    named = [entry for entry in who if entry[0] is not None][:MOST_COSTS]
    rest = [entry for entry in who if entry not in named]
    for engine_id, cost, prompt, queue, decodes, name in named:
        title = f"#{engine_id}" if name is None else f"#{engine_id} {printable(name)}"
        tokens = "-" if prompt is None else f"{prompt:,}"
        table.add_row(Text(title), tokens, f"{decodes:,}", duration(cost), duration(queue))
    if rest:
        cost, queue = sum(entry[1] for entry in rest), sum(entry[3] for entry in rest)
        decodes = sum(entry[4] for entry in rest)
        table.add_row("others", "-", f"{decodes:,}", duration(cost), duration(queue))
    return table


def fit_line(fit: Json) -> str:
    """Return the step model, and whether the split is rough."""
    if fit["r2"] is None:
        return "fit: no steps are recorded"
    rough = fit["r2"] < ROUGH_R2 or fit["steps"] < ROUGH_STEPS
    warning = " (rough here)" if rough else ""
    return (
        f"fit: {fit['steps']:,} steps, R2 {fit['r2']:.2f}{warning}; a step takes "
        f"{duration(fit['base_ms'])}, {fit['prefill_us_per_token']:.0f} us a prompt token, "
        f"{fit['decode_us_per_token']:.0f} us a decode, "
        f"{fit['context_ns_per_key']:.1f} ns a key"
    )


def duration(milliseconds: float) -> str:
    """Return a time with three digits or so, in ms or s."""
    if abs(milliseconds) >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    digits = 0 if abs(milliseconds) >= 100 else 1
    return f"{milliseconds:.{digits}f} ms"


def show_prompt(rendered: Json, console: Console) -> None:
    """Print the answer of /v1/chat/completions/render."""
    cached = rendered["cached_tokens"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, justify in (("pos", "right"), ("id", "right"), ("token", "left"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    tokens = zip(rendered["token_ids"], rendered["token_strs"], strict=True)
    for position, (token, entry) in enumerate(tokens):
        is_cached = position < cached
        state = Text("cached", "cyan") if is_cached else Text("new", "green")
        table.add_row(str(position), str(token), Text(printable(entry or "?")), state)
    console.print(table)
    count, longest = rendered["count"], rendered["max_model_len"]
    console.print(Text(f"{count} of {longest} tokens: {cached} cached, {count - cached} new"))
    for warning in rendered["lint"]:
        line = f"{warning['code']}: {printable(warning['message'])}"
        console.print(Text(line, "yellow"))
