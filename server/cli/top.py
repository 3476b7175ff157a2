"""`penstock top`: what a running server's engine does, live in the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.errors import printable
from server.cli.api_client import ApiClient, ClientError, check, document

HEADERS = {"X-Penstock-UI": "1", "Accept": "text/event-stream"}
RATE_S = 2.0  # the time over which tokens per second are counted
ONCE_S = 1.0  # for how long --once counts them, if the engine works
ALL_WAIT = {
    "rows": "the batch is full",
    "budget": "the step's token budget is used",
    "preemption": "a request was preempted in this step",
    "adapter": "its adapter is not in memory",
}
Json = Mapping[str, Any]


class Top:
    """The last frame, and what is computed from several."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._hello: Json = {}
        self._frame: Json = {}
        self._generated: deque[tuple[float, int]] = deque()  # (seconds, tokens since the start)

    @property
    def has_begun(self) -> bool:
        """Whether there is a picture."""
        return bool(self._hello)

    @property
    def is_busy(self) -> bool:
        stats = self._frame["stats"]
        return bool(stats["running"] + stats["waiting"])

    def take(self, event: str, frame: Json) -> None:
        if event == "hello":
            self._hello = frame
        self._frame = frame
        at = frame["t"] / 1e6
        self._generated.append((at, frame["stats"]["generated"]))
        while len(self._generated) > 2 and self._generated[1][0] < at - RATE_S:
            self._generated.popleft()

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        (begin, before), (end, after) = self._generated[0], self._generated[-1]
        if not self.is_busy or end <= begin:
            return 0.0
        return max(0.0, (after - before) / (end - begin))

    def picture(self, rows: int) -> Group:
        """Return what is shown, with at most `rows` requests."""
        stats = self._frame["stats"]
        total = max(stats["total"], 1)
        hits = stats["prefix_hits"] / max(stats["prefix_queries"], 1)
        line = (
            f"running {stats['running']}  waiting {stats['waiting']}  "
            f"KV {stats['held'] / total:.1%} (+{stats['cached'] / total:.1%} cached)  "
            f"{self.rate:.0f} tok/s  prefix hits {hits:.0%}  preempted {stats['preemptions']}"
        )
        parts: list[Text | Table] = [Text(printable(self._model), "bold"), Text(line)]
        if self._hello["role"] != "admin":
            parts.append(Text("your own requests only; an admin key shows all", "dim"))
        requests = self._frame["requests"]
        if requests:
            parts.append(self._table(requests[:rows]))
        hidden = stats["running"] + stats["waiting"] - len(requests[:rows])
        if hidden > 0:
            parts.append(Text(f"{hidden} more requests", "dim"))
        return Group(*parts)

    def _table(self, requests: list[Json]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("id", "state"):
            table.add_column(heading)
        for heading in ("prompt", "cached", "out", "blocks"):
            table.add_column(heading, justify="right")
        table.add_column("waits")
        places = dict(self._frame["queue"]["requests"])
        for request in requests:
            why = ""
            if request["id"] in places:
                waited = max(0.0, (self._frame["t"] - request["arrived"]) / 1e6)
                why = f"{waited:.1f} s: {self._reason(places[request['id']])}"
            figures = [f"{request[name]:,}" for name in ("prompt", "cached", "out", "blocks")]
            table.add_row(f"#{request['id']}", request["state"], *figures, why)
        return table

    def _reason(self, place: int) -> str:
        """Return why the request at this place of the queue waits."""
        queue = self._frame["queue"]
        reason = queue["reason"]
        if reason in ALL_WAIT:
            return ALL_WAIT[reason]
        if place:
            first = queue["first"]
            return "behind another request" if first is None else f"behind #{first}"
        if reason == "blocks":
            return f"no blocks (needs {queue['needed']}, {queue['available']} available)"
        if reason == "prefix":
            other = queue["sharing"]
            name = "another request" if other is None else f"#{other}"
            return f"to reuse blocks that {name} computes"
        return "other texts use the encoder's budget"


def frames(response: httpx2.Response) -> Iterator[tuple[str, Json]]:
    """Yield the events `hello` and `frame` of a response, with their documents, until its end."""
    name = "message"
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and name == "end":
            return
        elif line.startswith("data: ") and name in ("hello", "frame"):
            yield name, orjson.loads(line.removeprefix("data: "))


def show(client: ApiClient, console: Console, *, once: bool) -> None:
    """Print what the engine does until Ctrl-C or the server's end. Raises ClientError."""
    with client.errors():
        greeting = client.http.get("/ui/api/hello", headers=HEADERS)
        top = Top(str(document(greeting).get("model", {}).get("id")))
        with client.http.stream("GET", "/ui/api/watch", headers=HEADERS) as response:
            if response.status_code != 200:
                response.read()
                check(response)
            if once:
                _once(top, response)
            else:
                _live(top, response, console)
    if not once or not top.has_begun:
        raise ClientError("The server has ended the view.")
    console.print(top.picture(rows=64))


def _once(top: Top, response: httpx2.Response) -> None:
    """Read the first event, and those of a second more if the engine works."""
    begun = time.monotonic()
    for name, frame in frames(response):
        top.take(name, frame)
        if not top.is_busy or time.monotonic() - begun > ONCE_S:
            return


def _live(top: Top, response: httpx2.Response, console: Console) -> None:
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for name, frame in frames(response):
            top.take(name, frame)
            live.update(top.picture(rows=max(1, console.height - 5)), refresh=True)
