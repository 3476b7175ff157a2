"""`penstock open`: the link that it prints and opens, and what it says without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from server.cli import open_pages
from server.cli.main import app
from server.cli.servers import ServerChoiceError

Run = Callable[..., tuple[int, str]]  # with arguments; returns status and output


class Answer(BaseHTTPRequestHandler):
    """Answers like a server whose GET / has this body."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The links that were opened."""
    links: list[str] = []

    def open_link(link: str) -> bool:
        links.append(link)
        return True

    monkeypatch.setattr(open_pages.webbrowser, "open", open_link)
    return links


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["open", *arguments])
        output, errors = capfd.readouterr()
        return result.exit_code, output + errors

    return run


@pytest.mark.parametrize("ending", ["", "/", "/v1"])
def test_open_prints_and_opens_the_link(
    run: Run, url: str, opened: list[str], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "body", b'{"ui": "/ui/"}')
    assert run(url + ending) == (0, f"{url}/ui/\n")
    assert opened == [f"{url}/ui/"]


@pytest.mark.parametrize("body", [b"{}", b"<html>", b"[]"])
def test_open_server_without_pages_says_how_to_start_one(
    run: Run, url: str, opened: list[str], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "body", body)
    status, output = run(url)
    assert status == 1
    assert "--ui" in output
    assert opened == []


def test_open_without_a_server_says_how_to_start_one(run: Run, opened: list[str]) -> None:
    status, output = run("http://127.0.0.1:9")
    assert status == 1
    assert "penstock serve" in output
    status, output = run("no-such-model")
    assert status == 1
    assert "penstock serve no-such-model" in output
    assert opened == []


def test_open_without_a_browser_still_prints_the_link(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "body", b'{"ui": "/ui/"}')
    monkeypatch.setattr(open_pages.webbrowser, "open", lambda link: False)
    status, output = run(url)
    assert status == 0
    assert f"{url}/ui/\n" in output
    assert "No browser" in output


def test_open_several_servers_asks_for_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def several() -> str:
        raise ServerChoiceError("2 servers are running: give --url (a, b).")

    monkeypatch.setattr(open_pages, "default_url", several)
    status, output = run()
    assert status == 1
    assert "penstock open URL" in output
