"""`penstock open`: the built-in pages of a running server in the browser."""

from __future__ import annotations

import json
import sys
import webbrowser
from contextlib import closing

from server.cli.api_client import ApiClient, ClientError, check
from server.cli.console import say
from server.cli.servers import ServerChoiceError, default_url, running_servers


def open_in_browser(server: str | None, api_key: str) -> None:
    """Print the link to the pages of `server`, and open it.

    `server` is a URL, or what `RunningServer.matches` takes. Raises ClientError if no server
    answers there or it serves no pages, and ServerChoiceError if none or several fit.
    """
    url = _url_of(server, api_key)
    with closing(ApiClient(url, api_key)) as client:
        with client.errors():
            facts = client.http.get("/", headers={"accept": "application/json"})
        link = f"{client.url.rstrip('/')}/ui/"
        check(facts)
        if "ui" not in _object(facts.text):
            raise ClientError(
                f"The server at {client.url} does not serve its pages. Start it with --ui; on a "
                "network address that needs an API key."
            )
    sys.stdout.write(f"{link}\n")
    sys.stdout.flush()
    if not webbrowser.open(link):
        say("penstock: No browser was found here; open the link yourself.")


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _url_of(server: str | None, api_key: str) -> str:
    if server is None:
        try:
            return default_url()
        except ServerChoiceError as error:
            message = str(error).replace("give --url", "name one, `penstock open URL`")
            raise ServerChoiceError(message) from None
    if "://" in server or ":" in server:
        return server
    found = [running for running in running_servers(api_key) if running.matches(server)]
    if not found and ("." in server or server == "localhost"):
        return server  # a host
    if len(found) != 1:
        what = "No server fits" if not found else f"{len(found)} servers fit"
        raise ServerChoiceError(
            f"{what} {server!r}. `penstock ps` lists the running ones; start one with "
            f"`penstock serve {server}`."
        )
    if not found[0].url:
        raise ServerChoiceError(f"The server {server!r} does not listen yet; try again.")
    return found[0].url
