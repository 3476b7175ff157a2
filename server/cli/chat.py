"""`penstock chat`: a terminal client of the HTTP API."""

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

from server.cli.api_client import ApiClient, ClientError, check
from server.cli.console import say, visible

# With fewer pieces or in less time, a rate would measure network packets instead of generation.
RATE_PIECES = 4
RATE_S = 0.1
ENDS = ("/bye", "/exit")
COMMANDS = (
    "/reset forgets the conversation; /bye or Ctrl-D ends the chat. "
    "While the model answers, Ctrl-C stops the answer."
)


class Chat:
    """A conversation with one model.

    Every question sends all messages of the conversation and `options`, parameters of the API.
    Options that are None are not sent. Raises ClientError if an argument cannot be sent.
    """

    def __init__(
        self, url: str, key: str, model: str | None, system: str | None, **options: float | None
    ) -> None:
        self.summary = ""  # statistics of the last answer; empty if it had no text
        self.sampling = ""  # the sampling values that neither the user nor the model has given
        self._model = model
        self._remembers = True
        self._start = [{"role": "system", "content": system}] if system else []
        self.reset()
        self._options = {name: value for name, value in options.items() if value is not None}
        for name, value in self._options.items():
            if not math.isfinite(value):
                raise ClientError(f"--{name.replace('_', '-')}: {value} is not a finite number.")
        self._client = ApiClient(url, key)

    def close(self) -> None:
        self._client.close()

    def reset(self) -> None:
        """Forget the conversation, except for the system message."""
        self._messages = list(self._start)

    def connect(self) -> str:
        """Return the name of the model. Raises ClientError if the server has no usable model."""
        with self._client.errors():
            response = self._client.http.get("/v1/models")
            check(response)
        try:
            models = {entry["id"]: entry for entry in response.json()["data"]}
            kinds = {name: entry.get("kind") for name, entry in models.items()}
            self._model = self._model or next(iter(kinds))
        except (ValueError, LookupError, TypeError, StopIteration):
            raise ClientError(
                f"{self._client.url}/v1/models lists no models; check --url."
            ) from None
        if self._model not in kinds:
            raise ClientError(
                f"The server has no model {self._model}; give one of: {', '.join(kinds)}."
            )
        if kinds[self._model] == "encoder":
            raise ClientError(
                f"{self._model} computes embeddings (POST /v1/embeddings) and cannot chat."
            )
        self._remembers = kinds[self._model] != "encoder-decoder"  # it accepts a single message
        given = models[self._model].get("client_sampling")
        self._add_sampling(given if isinstance(given, dict) else {})
        return self._model

    def _add_sampling(self, suggested: dict[str, Any]) -> None:
        """Send the server's suggested values, except those that an option sets."""
        added = {name: value for name, value in suggested.items() if name not in self._options}
        self._options |= added
        if added:
            values = ", ".join(f"{name} {value}" for name, value in added.items())
            self.sampling = f"Sampling: {values} (the model gives none)"

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer piece by piece.

        Closing the iterator stops the answer; the conversation keeps the text received so far.
        """
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
            self._client.errors(),
            self._client.http.sse("/v1/chat/completions", method="POST", json=body) as source,
        ):
            if source.response.status_code != 200:
                source.response.read()
            check(source.response)
            yield from _chunks(source)


def _summary(tokens: int, moments: list[float]) -> str:
    """Return the statistics of an answer. `moments` has the seconds from question to each piece."""
    span = moments[-1] - moments[0]
    enough = len(moments) >= RATE_PIECES and span >= RATE_S
    rate = f" {(tokens - 1) / span:.1f} tok/s," if enough else ""
    return f"{tokens} tokens,{rate} first after {moments[0]:.2f} s"


def _chunks(events: Iterable[httpx2.ServerSentEvent]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each event before [DONE].

    Raises ClientError for an error event, an invalid event or a stream that ends early.
    """
    for event in events:
        if event.data == "[DONE]":
            return
        if not event.data:  # an event that only sets the retry time
            continue
        try:
            chunk = json.loads(event.data)
        except ValueError as error:
            raise ClientError(f"The answer was cut off: an event is not JSON ({error}).") from None
        if not isinstance(chunk, dict):
            raise ClientError(
                f"The answer was cut off: an event is not a JSON object ({chunk!r:.99})."
            )
        if cause := chunk.get("error"):
            message = cause.get("message") if isinstance(cause, dict) else cause
            raise ClientError(f"The answer was cut off: {message}")
        yield chunk
    raise ClientError("The answer was cut off: the stream ended without [DONE].")


def converse(chat: Chat, quick: str | None) -> int:
    """Send `quick`, or else every line of stdin, and print the answers.

    Returns the exit status: 1 if the server cannot be used or a question failed. Failed questions
    of an interactive chat do not count.
    """
    # A process that a script starts in the background ignores SIGINT. Here it stops an answer.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `ask` reports bytes that are not UTF-8
    try:
        model = chat.connect()
        if chat.sampling:
            sys.stderr.write(f"{chat.sampling}\n")
        if quick is not None:
            _answer(chat, quick)
            return 0
    except ClientError as error:
        return _complain(error)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  adds line editing and history to `input`

        say(f"{model}: {COMMANDS}")
    status = 0
    try:
        while True:
            text = input("> " if interactive else "").strip()
            if text in ENDS:
                break
            try:
                _obey(chat, text)
            except ClientError as error:
                status = _complain(error)
    except (EOFError, KeyboardInterrupt):
        if interactive:  # so that the shell's prompt begins on a new line
            sys.stdout.write("\n")
    return 0 if interactive else status


def _obey(chat: Chat, text: str) -> None:
    """Do what one line of the conversation says: a command, or a question."""
    if text in ("/reset", "/clear"):
        chat.reset()
    elif text in ("/help", "/?"):
        sys.stderr.write(f"{COMMANDS}\n")
    elif text.startswith("/") and text.split()[0][1:].isalpha():
        raise ClientError(f"There is no command {text.split()[0]}. {COMMANDS}")
    elif text:
        _answer(chat, text)


def _complain(error: ClientError) -> int:
    say(f"penstock: {error}")
    return 1


def _answer(chat: Chat, question: str) -> None:
    # A pipe or a file gets the model's text as it is.
    shown = visible if sys.stdout.isatty() else str
    try:
        with contextlib.closing(chat.ask(question)) as pieces:
            for piece in pieces:
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if chat.summary:
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        sys.stderr.write(f"{dim}{chat.summary}{plain}\n")
