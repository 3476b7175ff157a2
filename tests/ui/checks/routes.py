"""Answers of the server on their way to a page: read, or with one figure changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Json = Any
Change = Callable[[Json], None]

# Calls a function of a name and a document for each event of the endless stream of /ui/api/watch.
WATCH = """
(() => {
  const change = CHANGE;
  const altered = (block) => {
    const [, name, data] = /event: ?(.*)\\n(?:.*\\n)*?data: ?(.*)/.exec(block) ?? [];
    if (!data) return block;
    const document = JSON.parse(data);
    change(name, document);
    return `event: ${name}\\ndata: ${JSON.stringify(document)}`;
  };
  const real = window.fetch;
  window.fetch = async (...given) => {
    const response = await real(...given);
    if (!String(given[0]).includes("/ui/api/watch")) return response;
    let rest = "";
    const writer = new TransformStream({ transform(text, out) {
      const parts = (rest + text).replaceAll("\\r\\n", "\\n").split("\\n\\n");
      rest = parts.pop();
      for (const part of parts) out.enqueue(`${altered(part)}\\n\\n`);
    } });
    const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(writer)
      .pipeThrough(new TextEncoderStream());
    return new Response(body, { status: response.status, headers: response.headers });
  };
})();
"""


def alter_json(page: Any, pattern: str, change: Change) -> None:
    """Let `change` alter the JSON of each answer of these routes."""

    def handle(route: Any) -> None:
        response = route.fetch()
        document = response.json()
        change(document)
        route.fulfill(response=response, json=document)

    page.route(pattern, handle)


def alter_bytes(page: Any, pattern: str, change: Callable[[bytearray], None]) -> None:
    """Let `change` alter the body of each answer of these routes."""

    def handle(route: Any) -> None:
        response = route.fetch()
        body = bytearray(response.body())
        change(body)
        route.fulfill(response=response, body=bytes(body))

    page.route(pattern, handle)


def alter_stream(page: Any, pattern: str, change: Change = lambda events: None) -> list[list[Json]]:
    """Let `change` alter the list of events of each stream of these routes, which must end.

    Returns a list that gets the events of each stream as the server has sent them.
    """
    streams: list[list[Json]] = []

    def handle(route: Any) -> None:
        response = route.fetch()
        lines = [line[6:] for line in response.text().splitlines() if line.startswith("data: {")]
        streams.append([json.loads(line) for line in lines])
        events = [json.loads(line) for line in lines]
        change(events)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(response=response, body=f"{body}data: [DONE]\n\n")

    page.route(pattern, handle)
    return streams


def alter_watch(page: Any, change: str) -> None:
    """Let the JavaScript function `change(name, document)` alter the events of the live view.

    It must be called before the page is opened.
    """
    page.add_init_script(WATCH.replace("CHANGE", change))
