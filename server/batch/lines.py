"""The lines of a batch's input: OpenAI's batch format, one JSON object per line."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, get_args

import msgspec

# Paths that a line may name. A new route whose answers are JSON belongs here.
Endpoint = Literal[
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/classify",
    "/v1/score",
]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
MAX_LINES = 50_000
MAX_PROBLEMS = 100  # reported per batch
BLANK = b" \t\r\n"
LARGE = 64 << 10  # bytes of a line whose parsing delays other threads
PAUSE = 3  # pause after a large line, as a multiple of its parsing time


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch. `body` is its JSON text, which only the route validates."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class BodyFields(msgspec.Struct, frozen=True):
    """The fields of a line's body that matter to a batch."""

    stream: Any = None
    priority: Any = None


class LineProblem(msgspec.Struct, frozen=True):
    """Why a batch cannot run, as in OpenAI's BatchError. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BadLine(Exception):
    """A line cannot be sent. The argument is the LineProblem."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True)
class Input:
    """The input of a batch, after the check of all its lines."""

    path: Path
    custom_ids: frozenset[str] = frozenset()
    problems: list[LineProblem] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.custom_ids)


_LINE = msgspec.json.Decoder(BatchLine)
_BODY = msgspec.json.Decoder(BodyFields)


def parse_line(raw: bytes) -> BatchLine:
    """Return the request in a line. Raises BadLine."""
    try:
        raw.decode()
        return _LINE.decode(raw)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", f"{error}.", _named(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error}.") from None


def _named(message: str) -> str | None:
    """Return the field that an error of msgspec names: "at `$.url`" or "required field `url`"."""
    match = re.search(r"(?:at `\$\.|required field `)(\w+)", message)
    return match[1] if match else None


def body_fields(line: BatchLine) -> BodyFields:
    """Return the fields of a line's body that matter to a batch. Raises BadLine."""
    body = bytes(line.body)
    if not body.lstrip(BLANK).startswith(b"{"):
        raise BadLine("invalid_request", "body must be an object.", "body")
    try:
        return _BODY.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadLine("invalid_request", f"body is not valid: {error}.", "body") from None


def check_line(line: BatchLine, allowed: Collection[str]) -> None:
    """Raise BadLine if a line cannot be part of a batch of `allowed` paths."""
    if line.url not in allowed:
        paths = ", ".join(allowed)
        raise BadLine("invalid_url", f"url must be {paths}, not {line.url[:128]!r}.", "url")
    if body_fields(line).stream not in (None, False):
        raise BadLine("invalid_request", "A line of a batch cannot stream.", "body.stream")


def check_input(path: Path, allowed: Collection[str], max_line_bytes: int) -> Input:
    """Return the input at `path`, after a check of all lines.

    Only a line's outer object is parsed. Its body is validated when it is sent. Raises OSError.
    """
    custom_ids: set[str] = set()
    problems: list[LineProblem] = []

    def report(number: int | None, error: BadLine) -> None:
        problems.append(LineProblem(error.code, str(error), error.param, number))

    with path.open("rb") as file:
        for number, raw in _raw_lines(file, max_line_bytes):
            begin = time.perf_counter()
            try:
                _add(raw, custom_ids, allowed, max_line_bytes)
            except BadLine as error:
                report(number, error)
            if len(problems) == MAX_PROBLEMS:
                break
            if len(raw) >= LARGE:
                time.sleep(PAUSE * (time.perf_counter() - begin))
    if not custom_ids and not problems:
        report(None, BadLine("empty_file", "The input has no lines."))
    return Input(path, frozenset(custom_ids), problems)


def _add(raw: bytes, custom_ids: set[str], allowed: Collection[str], most: int) -> None:
    """Check a line and add its custom_id. Raises BadLine."""
    if len(raw) > most:
        text = f"The line has more than {most} bytes, the limit of --max-body-bytes."
        raise BadLine("line_too_long", text)
    if len(custom_ids) == MAX_LINES:
        raise BadLine("too_many_lines", f"A batch has at most {MAX_LINES} lines.")
    line = parse_line(raw)
    check_line(line, allowed)
    if line.custom_id in custom_ids:
        text = f"custom_id {line.custom_id[:128]!r} is used by an earlier line, too."
        raise BadLine("duplicate_custom_id", text, "custom_id")
    custom_ids.add(line.custom_id)


def read_lines(path: Path, done: Collection[str], max_line_bytes: int) -> Iterator[BatchLine]:
    """Yield the lines of a checked input that are not `done`. Raises OSError or BadLine."""
    with path.open("rb") as file:
        for _, raw in _raw_lines(file, max_line_bytes):
            line = parse_line(raw)
            if line.custom_id not in done:
                yield line


def _raw_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers.

    Only `most` + 1 bytes of a longer line are held and yielded.
    """
    number = 0
    while raw := file.readline(most + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        rest = raw
        while len(raw) > most and rest and not rest.endswith(b"\n"):
            rest = file.readline(LARGE)
        if raw.strip(BLANK):
            yield number, raw


def with_priority(line: BatchLine, priority: int) -> bytes:
    """Return a line's body with this `priority`, unless the body names one.

    It is the last member, because parsers use the last of two: the body may have a null.
    """
    body = bytes(line.body).strip(BLANK)
    if body_fields(line).priority is not None:
        return body
    members = body[:-1].rstrip(BLANK)
    comma = b"" if members == b"{" else b","
    return b'%s%s"priority":%d}' % (members, comma, priority)
