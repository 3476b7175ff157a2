"""`penstock chat` against a small server that imitates the API.

It runs in this process, except where signals, a terminal or the bytes of its streams are tested.
"""

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

from tests.support.command_line import penstock

KEYS = {"PENSTOCK_API_KEY": "k1,k2"}
ROOT = Path(__file__).resolve().parents[3]
REFUSAL = json.dumps({"error": {"message": "Give a valid API key.", "code": "invalid_api_key"}})


class Api:
    """An ASGI app with /v1/models and chat completions, which stream `words`.

    It keeps the bodies of requests. `pause` is the time between words in seconds. `last`, if set,
    is the event that ends a stream instead of the usage. `listed`, if not empty, is the response of
    /v1/models.
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
        "env": {"PATH": "/usr/bin:/bin"} | KEYS | environ,
    }


def chat(*arguments: str, said: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return penstock("chat", *arguments, said=said, **KEYS | environ)


def talk(api: Api) -> subprocess.CompletedProcess[str]:
    return chat("--url", api.url, "--quick", "hi")


def test_chat_quick_prints_answer_to_stdout_and_statistics_to_stderr(api: Api) -> None:
    api.key = "k1"
    answer = chat("--url", api.url, "--quick", "hi", "--max-tokens", "9", "--temperature", "0")
    assert (answer.returncode, answer.stdout) == (0, "Hello there\n")
    assert answer.stderr.startswith("17 tokens, first after "), "two pieces give no rate"
    [asked] = api.asked
    assert asked["model"] == "first"
    assert (asked["max_tokens"], asked["temperature"], asked["stream"]) == (9, 0, True)


def test_chat_rate_excludes_the_first_token(api: Api) -> None:
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
def test_chat_on_a_full_disk_prints_no_traceback(
    api: Api, stream: str, status: int, said: str
) -> None:
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full}
        answer = subprocess.run(**command("--url", api.url, "--quick", "hi"), **streams, timeout=60)
    assert (answer.returncode, answer.stdout or answer.stderr) == (status, said)


@pytest.mark.parametrize("key", [b"\x04", b"\x03"], ids=["Ctrl-D", "Ctrl-C"])
def test_chat_left_in_a_terminal_ends_the_prompt_line(api: Api, key: bytes) -> None:
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
        time.sleep(0.5)  # Python would see a signal that comes before `input` only at the next key
        os.write(ours, key)
        assert terminal.wait(60) == 0
        assert os.read(ours, 999).endswith(b"\r\n")
    finally:
        terminal.kill()
        terminal.wait()
        os.close(ours)


HOSTILE = ["a\x1b", "]52;c;aGk=\x07", "\x9b2J", "\tb\r\nc\rd", "\u202ee", "\x08"]


def test_chat_in_a_terminal_shows_escape_sequences_instead_of_obeying_them(api: Api) -> None:
    """Also those whose characters come in several pieces."""
    api.words = HOSTILE
    ours, theirs = os.openpty()
    given = command("--url", api.url, "--quick", "hi")
    answer = subprocess.run(
        **given, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, timeout=60
    )
    os.close(theirs)
    shown = os.read(ours, 9999).decode()
    os.close(ours)
    assert answer.returncode == 0
    expected = "a\\x1b]52;c;aGk=\\x07\\x9b2J\tb\r\nc\\rd\\u202ee\\x08\r\n"
    assert shown.replace("        ", "\t") == expected


def test_chat_in_a_pipe_writes_the_text_of_the_model(api: Api) -> None:
    api.words = HOSTILE
    given = command("--url", api.url, "--quick", "hi")
    answer = subprocess.run(**{**given, "text": False}, capture_output=True, timeout=60)
    assert answer.stdout.decode() == "".join(HOSTILE) + "\n"


def test_chat_with_a_hostile_server_shows_its_error_in_one_line(api: Api) -> None:
    api.last = {"error": {"message": "no\x1b[2Jthing\nmore"}}
    answer = chat("--url", api.url, "--quick", "hi")
    assert answer.stderr == "penstock: The answer was cut off: no\\x1b[2Jthing\nmore\n"


def test_chat_with_undisplayable_characters_prints_question_marks(api: Api) -> None:
    api.words = ["sm\u00f6r", " \ud83d", "!"]
    for encoding, shown in (("ascii", "sm?r ?!\n"), ("utf-8", "sm\u00f6r ?!\n")):
        given = command("--url", api.url, "--quick", "hi", PYTHONIOENCODING=encoding)
        answer = subprocess.run(**given, capture_output=True, timeout=60)
        assert (answer.returncode, answer.stdout) == (0, shown), answer.stderr


def test_chat_with_invalid_host_name_prints_one_line() -> None:
    answer = chat("--url", f"http://{'a' * 64}.x", "--quick", "hi")
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert "Give --url one like" in answer.stderr


def test_chat_url_with_v1_suffix_works(api: Api) -> None:
    api.url += "/v1/"
    assert talk(api).stdout == "Hello there\n"


def test_chat_url_without_scheme_works(api: Api) -> None:
    """`penstock bench` accepts such a URL, too."""
    api.url = api.url.replace("http://127.0.0.1", "localhost")
    assert talk(api).stdout == "Hello there\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:abc"], "http://127.0.0.1:abc: Invalid port: 'abc'"),
        (["--url", "http://[::1"], "http://[::1: "),
        (["--url", "ftp://a"], "ftp://a is not the URL of a server; give --url one like http://"),
        (["--url", ""], "is not the URL of a server"),
        (
            ["--url", "http://127.0.0.1:9", "--api-key", "k\u00e9y"],
            "The API key has characters that are not allowed in an HTTP",
        ),
        (
            ["--url", "http://127.0.0.1:9", "--temperature", "nan"],
            "--temperature: nan is not a finite number",
        ),
    ],
)
def test_chat_with_invalid_argument_prints_one_line(arguments: list[str], said: str) -> None:
    answer = chat(*arguments, "--quick", "hi")
    assert (answer.returncode, len(answer.stderr.splitlines())) == (1, 1), answer.stderr
    assert said in answer.stderr


@pytest.mark.parametrize("listed", ["<html>", '{"data":[]}', "{}", "[]", '{"data":["a"]}'])
def test_chat_with_server_that_lists_no_models_prints_one_line(api: Api, listed: str) -> None:
    api.listed = listed
    answer = talk(api)
    assert (answer.returncode, len(answer.stderr.splitlines())) == (1, 1), answer.stderr
    assert f"{api.url}/v1/models lists no models" in answer.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_chat_with_invalid_utf8_input_fails_one_question(api: Api, locale: str) -> None:
    started = command("--url", api.url)
    environ = {**started.pop("env"), "LC_ALL": locale}
    del started["text"]
    said = b"caf\xe9\nhi\n"
    answer = subprocess.run(**started, env=environ, input=said, capture_output=True, timeout=60)
    assert answer.returncode == 1
    assert answer.stdout == b"\nHello there\n"
    assert answer.stderr.startswith(b"penstock: The input is not valid UTF-8")
    assert [asked["messages"][-1]["content"] for asked in api.asked] == ["hi"]


def test_chat_keeps_the_conversation_until_reset(api: Api) -> None:
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


def test_chat_with_encoder_decoder_sends_one_message(api: Api) -> None:
    api.models = [{"id": "first", "kind": "encoder-decoder"}]
    assert chat("--url", api.url, said="one\ntwo\n").returncode == 0
    talks = [[(m["role"], m["content"]) for m in asked["messages"]] for asked in api.asked]
    assert talks == [[("user", "one")], [("user", "two")]]


def test_chat_interrupted_answer_is_kept_in_the_conversation(api: Api) -> None:
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
        process.send_signal(signal.SIGINT)  # it waits for a line now, so this ends the chat
        assert process.wait(30) == 0
    [user, partial, again] = api.asked[1]["messages"]
    assert (user["content"], again["content"]) == ("count", "again")
    assert partial["role"] == "assistant"
    assert partial["content"].startswith("One two")


def test_chat_without_a_server_says_how_to_start_one() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        answer = chat("--url", f"http://127.0.0.1:{unused.getsockname()[1]}", "--quick", "hi")
    assert answer.returncode == 1
    assert "`penstock serve`" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("environ", [{}, {"HTTPS_PROXY": "http://127.0.0.1:9"}], ids=str)
def test_chat_with_https_to_a_plain_server_names_ssl(api: Api, environ: dict[str, str]) -> None:
    answer = chat("--url", api.url.replace("http:", "https:"), "--quick", "hi", **environ)
    assert answer.returncode == 1
    # The server may have logged a line before, about a request that is no HTTP.
    assert re.search(
        r"^penstock: No server answers at https://\S+ \(.*SSL.*\n\Z", answer.stderr, re.M
    )


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_chat_with_loopback_server_ignores_proxies(api: Api, variable: str, proxy: str) -> None:
    answer = chat("--url", api.url, "--quick", "hi", **{variable: proxy})
    assert (answer.returncode, answer.stdout) == (0, "Hello there\n"), answer.stderr


@pytest.mark.parametrize(
    ("environ", "cause"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:9"}, "SOCKS"),  # SOCKS needs an extra package
        ({"HTTP_PROXY": "::"}, "Invalid port"),
        ({"HTTP_PROXY": "ftp://proxy"}, "ftp://proxy"),
        ({"SSL_CERT_FILE": "/nowhere.pem"}, "No such file"),
    ],
    ids=str,
)
def test_chat_with_invalid_proxy_or_certificates_prints_one_line(
    environ: dict[str, str], cause: str
) -> None:
    answer = chat("--url", "http://nowhere.invalid", "--quick", "hi", **environ)
    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1
    assert cause in answer.stderr
    assert "--url" not in answer.stderr


def test_chat_refused_by_the_server_prints_one_line(api: Api) -> None:
    unknown = chat("--url", api.url, "--model", "third", "--quick", "hi")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (1, 1)
    assert "first, second" in unknown.stderr
    encoder = chat("--url", api.url, "--model", "vectors", "--quick", "hi")
    assert (encoder.returncode, len(encoder.stderr.splitlines())) == (1, 1)
    assert "vectors computes embeddings" in encoder.stderr
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
        ({"error": "overloaded"}, "overloaded"),  # some other servers send only a string
        (5, "an event is not a JSON object (5)."),
        ({"choices": [{"index": 0, "finish_reason": "stop"}]}, "the stream ended without [DONE]."),
        ({"choices": None, "usage": {"completion_tokens": 2}}, "the stream ended without [DONE]."),
    ],
)
def test_chat_with_broken_stream_reports_the_cut(api: Api, last: Any, words: str) -> None:
    api.last = last
    answer = chat("--url", api.url, said="hi\n")
    assert answer.returncode == 1
    assert answer.stdout == "Hello there\n"
    assert f"The answer was cut off: {words}" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_chat_with_unknown_command_asks_nothing(api: Api) -> None:
    """Such as Ollama's `/set`. A path is no command."""
    answer = chat("--url", api.url, said="/set parameter x\n/clear\n/etc/hosts: what is it?\n")
    assert answer.returncode == 1
    assert "There is no command /set. /reset forgets" in answer.stderr
    assert [asked["messages"][-1]["content"] for asked in api.asked] == ["/etc/hosts: what is it?"]
