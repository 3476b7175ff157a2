"""`penstock chat`: a conversation in the terminal over the HTTP API, like any client's."""

from __future__ import annotations

import contextlib
import io
import json
import math
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx2

from server.listen import is_loopback

# What comes in fewer pieces, or in less time, tells of the network's packets and not of a rate.
RATE_PIECES = 4
RATE_S = 0.1
COMMANDS = (
    "/reset forgets the conversation; /exit, Ctrl-D or Ctrl-C leave. "
    "While it answers, Ctrl-C stops the answer."
)


class ChatError(Exception):
    """Something the user should read in one line."""


class Chat:
    """A conversation with one model. Its messages are sent anew with each question, and so are
    `options`, parameters of the API of which None are not given. Raises ChatError where no server
    can be asked so."""

    def __init__(
        self, url: str, key: str, model: str | None, system: str | None, **options: float | None
    ) -> None:
        self.summary = ""  # of the last answer, empty where nothing came
        full = url if "://" in url else f"http://{url}"
        self._url = full.rstrip("/").removesuffix("/v1")
        self._model = model
        self._remembers = True
        self._start = [{"role": "system", "content": system}] if system else []
        self.reset()
        self._options = {name: value for name, value in options.items() if value is not None}
        for name, value in self._options.items():
            if not math.isfinite(value):
                raise ChatError(f"--{name.replace('_', '-')}: {value} is no finite number.")
        if not (key.isascii() and key.isprintable()):
            raise ChatError("The API key has characters that no header can carry; see --api-key.")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A long prompt on a busy server may take minutes to its first token: no read timeout.
        timeout = httpx2.Timeout(10, read=None)
        with self._errors():
            address = httpx2.URL(self._url)
        try:
            address.host.encode("idna")
        except UnicodeError as error:
            raise ChatError(f"{url}: {error}. Give --url one like http://127.0.0.1:8000.") from None
        if address.scheme not in ("http", "https") or not address.host:
            raise ChatError(
                f"{url} is not the URL of a server; give --url one like http://127.0.0.1:8000."
            )
        # No proxy reaches what only this machine does; of TLS the environment names certificates.
        # A name is the proxy's to look up.
        here, tls = is_loopback(address.host, look_up=False), address.scheme == "https"
        try:
            self._http = httpx2.Client(
                base_url=address,
                headers=headers,
                timeout=timeout,
                transport=httpx2.HTTPTransport(trust_env=tls) if here else None,
            )
        except (httpx2.InvalidURL, ImportError, OSError, ValueError) as error:
            raise ChatError(
                "The proxy or the certificates of the environment (HTTP_PROXY, HTTPS_PROXY, "
                f"ALL_PROXY, SSL_CERT_FILE) cannot be used: {error}"
            ) from None

    def close(self) -> None:
        self._http.close()

    def reset(self) -> None:
        """Forgets the conversation, but not the system message."""
        self._messages = list(self._start)

    def connect(self) -> str:
        """The model that answers. Raises ChatError where there is no usable server."""
        with self._errors():
            response = self._http.get("/v1/models")
            _check(response)
        try:
            kinds = {entry["id"]: entry.get("kind") for entry in response.json()["data"]}
            self._model = self._model or next(iter(kinds))
        except (ValueError, LookupError, TypeError, StopIteration):
            raise ChatError(
                f"{self._url}/v1/models lists no models; is it the right --url?"
            ) from None
        if self._model not in kinds:
            raise ChatError(f"The server has no model {self._model}, but {', '.join(kinds)}.")
        if kinds[self._model] == "encoder":
            raise ChatError(
                f"{self._model} makes embeddings (POST /v1/embeddings); it cannot chat."
            )
        self._remembers = kinds[self._model] != "encoder-decoder"  # which reads one text
        return self._model

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece. Closing the iterator stops it and keeps what has come."""
        if not self._remembers:
            self.reset()
        self._messages.append({"role": "user", "content": question})
        started = time.perf_counter()
        moments: list[float] = []
        pieces: list[str] = []
        tokens = 0
        try:
            for chunk in self._chunks():
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices") or []:
                    if piece := (choice.get("delta") or {}).get("content"):
                        moments.append(time.perf_counter() - started)
                        pieces.append(piece)
                        yield piece
        finally:
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
                self.summary = _summary(tokens or len(pieces), moments)
            else:
                self._messages.pop()
                self.summary = ""

    def _chunks(self) -> Iterator[dict[str, Any]]:
        body = {
            "model": self._model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        with (
            self._errors(),
            self._http.sse("/v1/chat/completions", method="POST", json=body) as source,
        ):
            if source.response.status_code != 200:
                source.response.read()
            _check(source.response)
            yield from _chunks(source)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ChatError(
                f"No server answers at {self._url} ({error}). Start one with `penstock serve`, "
                "or name another with --url."
            ) from None
        except httpx2.HTTPError as error:
            raise ChatError(f"The connection to {self._url} failed: {error}") from None
        except httpx2.InvalidURL as error:
            raise ChatError(
                f"{self._url}: {error}. Give --url one like http://127.0.0.1:8000."
            ) from None
        except UnicodeEncodeError:
            raise ChatError("What was given or typed is no UTF-8, so it cannot be sent.") from None


def _summary(tokens: int, moments: list[float]) -> str:
    """Of one answer; each piece's seconds from the question."""
    span = moments[-1] - moments[0]
    enough = len(moments) >= RATE_PIECES and span >= RATE_S
    rate = f" {(tokens - 1) / span:.1f} tok/s," if enough else ""
    return f"{tokens} tokens,{rate} first after {moments[0]:.2f} s"


def _check(response: httpx2.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    hint = " Give the key with PENSTOCK_API_KEY." if response.status_code == 401 else ""
    raise ChatError(f"The server answered {response.status_code}: {message}{hint}")


def _chunks(events: Iterable[httpx2.ServerSentEvent]) -> Iterator[dict[str, Any]]:
    """The JSON of each event up to [DONE]. Raises ChatError for an error event or a cut."""
    for event in events:
        if event.data == "[DONE]":
            return
        if not event.data:  # of a server that only says when to come again
            continue
        try:
            chunk = json.loads(event.data)
        except ValueError as error:
            raise ChatError(f"The answer was cut off: an event is no JSON ({error}).") from None
        if not isinstance(chunk, dict):
            raise ChatError(f"The answer was cut off: an event is no JSON object ({chunk!r:.99}).")
        if cause := chunk.get("error"):
            message = cause.get("message") if isinstance(cause, dict) else cause
            raise ChatError(f"The answer was cut off: {message}")
        yield chunk
    raise ChatError("The answer was cut off: the stream ended early.")


def converse(chat: Chat, quick: str | None) -> int:
    """Asks `quick`, or what is typed until the end; the exit status, 1 where something failed."""
    # Started in the background of a script, SIGINT would be ignored: here it stops an answer.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `ask` tells of bytes that are no text
    try:
        model = chat.connect()
        if quick is not None:
            _answer(chat, quick)
            return 0
    except ChatError as error:
        return _complain(error)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  gives `input` its line editing and history

        sys.stderr.write(f"{model}: {COMMANDS}\n")
    status = 0
    try:
        while (text := input("> " if interactive else "").strip()) != "/exit":
            try:
                if text == "/reset":
                    chat.reset()
                elif text == "/help":
                    sys.stderr.write(f"{COMMANDS}\n")
                elif text:
                    _answer(chat, text)
            except ChatError as error:
                status = _complain(error)
    except (EOFError, KeyboardInterrupt):
        if interactive:  # the shell's prompt is not to stand behind ours
            sys.stdout.write("\n")
    return 0 if interactive else status


def _complain(error: ChatError) -> int:
    sys.stderr.write(f"penstock: {error}\n")
    return 1


def _answer(chat: Chat, question: str) -> None:
    try:
        with contextlib.closing(chat.ask(question)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if chat.summary:
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        sys.stderr.write(f"{dim}{chat.summary}{plain}\n")
