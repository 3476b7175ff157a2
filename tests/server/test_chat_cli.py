"""`penstock chat` as a process, against a small server that answers like the real API."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

ROOT = Path(__file__).resolve().parents[2]
REFUSAL = json.dumps({"error": {"message": "Give a valid API key.", "code": "invalid_api_key"}})


class Api:
    """An ASGI app: /v1/models, and chat completions that stream `words`. Keeps what it was asked.

    `pause` is slept between words; `last` is the data of an event that ends each stream in place of
    the usage; `listed` is the answer of /v1/models where it is not empty.
    """

    def __init__(self) -> None:
        self.words = ["Hello", " there"]
        self.pause = 0.0
        self.last: Any = None
        self.models = [{"id": "first"}, {"id": "second"}, {"id": "vectors", "kind": "encoder"}]
        self.listed = ""
        self.key = ""
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reply = Reply(send)
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.key and key != f"Bearer {self.key}":
            await reply.start(401, "application/json")
            await reply.body(REFUSAL, more=False)
        elif scope["path"] == "/v1/models":
            await reply.start(200, "application/json")
            await reply.body(self.listed or json.dumps({"data": self.models}), more=False)
        elif scope["path"] != "/v1/chat/completions":
            await reply.start(404, "text/plain")
            await reply.body("no such path", more=False)
        else:
            self.asked.append(json.loads((await receive())["body"]))
            await self._stream(reply)

    async def _stream(self, reply: Reply) -> None:
        await reply.start(200, "text/event-stream")
        await reply.body(": ping\n\n")
        for word in self.words:
            await reply.event({"choices": [{"index": 0, "delta": {"content": word}}]})
            await asyncio.sleep(self.pause)
        if self.last is not None:
            await reply.event(self.last)
        else:
            await reply.event({"choices": [], "usage": {"completion_tokens": 17}})
            await reply.body("data: [DONE]\n\n")
        await reply.body("", more=False)


class Reply:
    def __init__(self, send: Any) -> None:
        self._send = send

    async def start(self, status: int, kind: str) -> None:
        headers = [(b"content-type", kind.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, text: str, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
        await self._send(message)

    async def event(self, data: Any) -> None:
        await self.body(f"data: {json.dumps(data)}\n\n")


@pytest.fixture
def api() -> Iterator[Api]:
    app = Api()
    listener = socket.create_server(("127.0.0.1", 0))
    app.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield app
    server.should_exit = server.force_exit = True
    thread.join()
    listener.close()


def command(*arguments: str, **environ: str) -> dict[str, Any]:
    return {
        "args": [sys.executable, "-m", "server", "chat", *arguments],
        "cwd": ROOT,
        "text": True,
        "env": {"PATH": "/usr/bin:/bin", "PENSTOCK_API_KEY": "k1,k2"} | environ,
    }


def chat(*arguments: str, said: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    given = command(*arguments, **environ)
    return subprocess.run(**given, input=said, capture_output=True, timeout=60)


def talk(api: Api) -> subprocess.CompletedProcess[str]:
    return chat("--url", api.url, "--quick", "hi")


def test_quick_prints_the_answer_on_stdout_and_the_numbers_on_stderr(api: Api) -> None:
    api.key = "k1"
    answer = chat("--url", api.url, "--quick", "hi", "--max-tokens", "9", "--temperature", "0")
    assert (answer.returncode, answer.stdout) == (0, "Hello there\n")
    assert answer.stderr.startswith("17 tokens, first after "), "of two pieces no rate is told"
    [asked] = api.asked
    assert asked["model"] == "first"
    assert (asked["max_tokens"], asked["temperature"], asked["stream"]) == (9, 0, True)


def test_the_rate_is_of_the_tokens_after_the_first(api: Api) -> None:
    api.words, api.pause = ["a"] * 5, 0.1
    found = re.search(r"^17 tokens, (\S+) tok/s, first after ", talk(api).stderr)
    assert found
    assert 1 < float(found[1]) < 160, "16 tokens in about 0.4 s"


@pytest.mark.parametrize(
    ("stream", "status", "said"),
    [
        ("stderr", 0, "Hello there\n"),
        ("stdout", 1, "penstock: Cannot write to stdout: No space left on device.\n"),
    ],
)
def test_a_full_disk_is_no_traceback(api: Api, stream: str, status: int, said: str) -> None:
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full}
        answer = subprocess.run(**command("--url", api.url, "--quick", "hi"), **streams, timeout=60)
    assert (answer.returncode, answer.stdout or answer.stderr) == (status, said)


@pytest.mark.parametrize("key", [b"\x04", b"\x03"], ids=["Ctrl-D", "Ctrl-C"])
def test_leaving_ends_the_line_of_the_prompt(api: Api, key: bytes) -> None:
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    terminal = subprocess.Popen(
        **command("--url", api.url, TERM="dumb"), **streams, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    try:
        shown = b""
        while not shown.endswith(b"> "):
            shown += os.read(ours, 999)
        time.sleep(0.5)  # a signal just before it waits for a key, Python sees at the next key
        os.write(ours, key)
        assert terminal.wait(60) == 0
        assert os.read(ours, 999).endswith(b"\r\n")
    finally:
        terminal.kill()
        terminal.wait()
        os.close(ours)


def test_what_a_terminal_cannot_show_is_a_question_mark(api: Api) -> None:
    api.words = ["sm\u00f6r", " \ud83d", "!"]
    answer = chat("--url", api.url, "--quick", "hi", PYTHONIOENCODING="ascii")
    assert (answer.returncode, answer.stdout) == (0, "sm?r ?!\n"), answer.stderr
    answer = chat("--url", api.url, "--quick", "hi", PYTHONIOENCODING="utf-8")
    assert (answer.returncode, answer.stdout) == (0, "sm\u00f6r ?!\n"), answer.stderr


def test_a_host_that_is_no_name_is_one_line() -> None:
    answer = chat("--url", f"http://{'a' * 64}.x", "--quick", "hi")
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert "Give --url one like" in answer.stderr


def test_the_url_may_end_with_v1(api: Api) -> None:
    api.url += "/v1/"
    assert talk(api).stdout == "Hello there\n"


def test_the_url_may_go_without_http(api: Api) -> None:
    """As that of `penstock bench` may."""
    api.url = api.url.replace("http://127.0.0.1", "localhost")
    assert talk(api).stdout == "Hello there\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:abc"], "http://127.0.0.1:abc: Invalid port: 'abc'"),
        (["--url", "http://[::1"], "http://[::1: "),
        (["--url", "ftp://a"], "ftp://a is not the URL of a server; give --url one like http://"),
        (["--url", ""], "is not the URL of a server"),
        (["--api-key", "k\u00e9y"], "The API key has characters that no header can carry"),
        (["--temperature", "nan"], "--temperature: nan is no finite number"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments: list[str], said: str) -> None:
    answer = chat(*arguments, "--quick", "hi")
    assert (answer.returncode, len(answer.stderr.splitlines())) == (1, 1), answer.stderr
    assert said in answer.stderr


@pytest.mark.parametrize("listed", ["<html>", '{"data":[]}', "{}", "[]", '{"data":["a"]}'])
def test_a_url_that_lists_no_models_is_one_line(api: Api, listed: str) -> None:
    api.listed = listed
    answer = talk(api)
    assert (answer.returncode, len(answer.stderr.splitlines())) == (1, 1), answer.stderr
    assert f"{api.url}/v1/models lists no models" in answer.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text_cost_one_question(api: Api, locale: str) -> None:
    started = command("--url", api.url)
    environ = {**started.pop("env"), "LC_ALL": locale}
    del started["text"]
    said = b"caf\xe9\nhi\n"
    answer = subprocess.run(**started, env=environ, input=said, capture_output=True, timeout=60)
    assert answer.returncode == 1
    assert answer.stdout == b"\nHello there\n"
    assert answer.stderr.startswith(b"penstock: What was given or typed is no UTF-8")
    assert [asked["messages"][-1]["content"] for asked in api.asked] == ["hi"]


def test_the_conversation_is_kept_until_it_is_reset(api: Api) -> None:
    said = "one\n\ntwo\n/reset\n/help\nthree\n/exit\nnever\n"
    answer = chat("--url", api.url, "--model", "second", "--system", "Be kind.", said=said)
    assert answer.returncode == 0
    assert answer.stderr.count("/reset forgets the conversation") == 1
    talks = [[(m["role"], m["content"]) for m in asked["messages"]] for asked in api.asked]
    reply = ("assistant", "Hello there")
    kind = ("system", "Be kind.")
    assert talks == [
        [kind, ("user", "one")],
        [kind, ("user", "one"), reply, ("user", "two")],
        [kind, ("user", "three")],
    ]


def test_a_model_that_reads_one_text_is_sent_one(api: Api) -> None:
    api.models = [{"id": "first", "kind": "encoder-decoder"}]
    assert chat("--url", api.url, said="one\ntwo\n").returncode == 0
    talks = [[(m["role"], m["content"]) for m in asked["messages"]] for asked in api.asked]
    assert talks == [[("user", "one")], [("user", "two")]]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(api: Api) -> None:
    api.words, api.pause = ["One", " two"] + [" more"] * 1000, 0.05
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(**command("--url", api.url), **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("count\n")
        process.stdin.flush()
        assert process.stdout.read(7) == "One two"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().endswith("[stopped]\n")
        api.words, api.pause = ["Done"], 0.0
        process.stdin.write("again\n")
        process.stdin.flush()
        assert process.stdout.readline() == "Done\n"
        process.send_signal(signal.SIGINT)  # now it waits for a line: leave
        assert process.wait(30) == 0
    [user, partial, again] = api.asked[1]["messages"]
    assert (user["content"], again["content"]) == ("count", "again")
    assert partial["role"] == "assistant"
    assert partial["content"].startswith("One two")


def test_no_server_is_one_line_that_says_how_to_start_it() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        answer = chat("--url", f"http://127.0.0.1:{unused.getsockname()[1]}", "--quick", "hi")
    assert answer.returncode == 1
    assert "`penstock serve`" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("environ", [{}, {"HTTPS_PROXY": "http://127.0.0.1:9"}], ids=str)
def test_a_server_without_tls_is_told_from_none(api: Api, environ: dict[str, str]) -> None:
    answer = chat("--url", api.url.replace("http:", "https:"), "--quick", "hi", **environ)
    assert answer.returncode == 1
    assert re.fullmatch(r"penstock: No server answers at https://\S+ \(.*SSL.*\n", answer.stderr)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_no_proxy_is_asked_for_a_server_of_this_machine(
    api: Api, variable: str, proxy: str
) -> None:
    answer = chat("--url", api.url, "--quick", "hi", **{variable: proxy})
    assert (answer.returncode, answer.stdout) == (0, "Hello there\n"), answer.stderr


@pytest.mark.parametrize(
    ("environ", "cause"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:9"}, "SOCKS"),  # which asks for a package of its own
        ({"HTTP_PROXY": "::"}, "Invalid port"),
        ({"HTTP_PROXY": "ftp://proxy"}, "ftp://proxy"),
        ({"SSL_CERT_FILE": "/nowhere.pem"}, "No such file"),
    ],
    ids=str,
)
def test_an_environment_that_cannot_be_used_is_one_line(
    environ: dict[str, str], cause: str
) -> None:
    answer = chat("--url", "http://nowhere.invalid", "--quick", "hi", **environ)
    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1
    assert cause in answer.stderr
    assert "--url" not in answer.stderr


def test_refusals_are_one_line(api: Api) -> None:
    unknown = chat("--url", api.url, "--model", "third", "--quick", "hi")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (1, 1)
    assert "first, second" in unknown.stderr
    encoder = chat("--url", api.url, "--model", "vectors", "--quick", "hi")
    assert (encoder.returncode, len(encoder.stderr.splitlines())) == (1, 1)
    assert "vectors makes embeddings" in encoder.stderr
    assert not api.asked
    api.key = "other"
    denied = chat("--url", api.url, "--quick", "hi")
    assert (denied.returncode, len(denied.stderr.splitlines())) == (1, 1)
    assert "401: Give a valid API key." in denied.stderr
    assert "PENSTOCK_API_KEY" in denied.stderr


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"error": {"message": "The engine died."}}, "The engine died."),
        ({"error": "overloaded"}, "overloaded"),  # as servers that are not OpenAI's have it
        (5, "an event is no JSON object (5)."),
        ({"choices": [{"index": 0, "finish_reason": "stop"}]}, "the stream ended early."),
        ({"choices": None, "usage": {"completion_tokens": 2}}, "the stream ended early."),
    ],
)
def test_an_answer_that_breaks_off_is_said_so(api: Api, last: Any, words: str) -> None:
    api.last = last
    answer = chat("--url", api.url, said="hi\n")
    assert answer.returncode == 1
    assert answer.stdout == "Hello there\n"
    assert f"The answer was cut off: {words}" in answer.stderr
    assert "Traceback" not in answer.stderr
