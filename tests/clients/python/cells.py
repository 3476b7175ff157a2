"""The shared part of the Python runners: the servers to call, and the report of cells.

A runner is a script in the environment of its client. Its argument is the JSON of Target. It
prints one line of JSON per cell: {"cell", "passed", "reason"}. `passed` is null if the client has
no such feature.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = "What is the weather in Paris?"
WEATHER_MESSAGES = [{"role": "user", "content": WEATHER}]
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": CITY_SCHEMA,
    },
}
TOO_HOT = 3.0  # a temperature above the limit of 2
ABORT_S = 10

# The function of a runner for each cell.
CELLS = {
    "chat": "chat",
    "stream": "stream",
    "usage": "usage",
    "n": "several",
    "tools": "tools",
    "tools streamed": "tools_streamed",
    "json_schema": "json_schema",
    "400": "bad_request",
    "401": "wrong_key",
    "429": "rate_limit",
    "abort": "abort",
    "error in stream": "stream_error",
}


@dataclass(frozen=True)
class Target:
    """The servers of a run.

    `endless_url` serves a model that does not stop by itself; `engine_pid` is its engine process.
    Open WebUI only: `short_url` serves a model whose context is shorter than 36 tools; `browser` is
    the path of Chromium.
    """

    url: str
    key: str
    limited_key: str
    endless_url: str
    engine_pid: int
    short_url: str = ""
    browser: str = ""

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def endless_base_url(self) -> str:
        return f"{self.endless_url}/v1"

    def kill_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGKILL)

    def aborts(self) -> float:
        """Return how many requests of the endless server ended because their client left."""
        with urllib.request.urlopen(f"{self.endless_url}/metrics", timeout=10) as response:
            text = response.read().decode()
        found = re.search(r'^penstock:aborts_total\{.*reason="disconnect".*\} (\S+)$', text, re.M)
        return float(found[1]) if found else 0.0

    def check_aborted(self) -> None:
        """Wait until the server has aborted the one request that its client left."""
        deadline = time.monotonic() + ABORT_S
        while time.monotonic() < deadline:
            if self.aborts() == 1:
                return
            time.sleep(0.1)
        raise AssertionError(f"the server did not abort the request within {ABORT_S} s")


def target() -> Target:
    return Target(**json.loads(sys.argv[1]))


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    """Check the call of the weather tool."""
    assert name == "get_weather", name
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert list(values) == ["city"], values
    assert isinstance(values["city"], str), values


def check_usage(prompt: int | None, completion: int | None) -> None:
    assert prompt, f"prompt tokens: {prompt}"
    assert completion, f"completion tokens: {completion}"


def check_pieces(pieces: list[str]) -> None:
    """Check the pieces of a streamed answer to QUESTION."""
    assert len(pieces) > 1, pieces
    assert "Paris" in "".join(pieces), pieces


def check_error(error: BaseException, status: int, *parts: str) -> None:
    """Check that `error`, or what caused it, has the status and the parts of the message."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    statuses = [getattr(each, "status_code", None) for each in chain]
    assert status in statuses, f"status {statuses}: {error!r}"
    for part in parts:
        assert part in str(error), f"{part!r} is not in {error!s}"


def raised(call: Callable[[], Any]) -> Exception:
    """Return what `call` raises."""
    try:
        result = call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; the result is {result!r}")


async def raised_async(call: Callable[[], Any]) -> Exception:
    """Return what the coroutine of `call` raises."""
    try:
        result = await call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; the result is {result!r}")


def run(runner: Mapping[str, Any], **lacks: str) -> None:
    """Run the functions of a runner and print a line for each cell.

    `lacks` says for functions that the runner does not have why the client has no such cell.
    """
    for name, function in CELLS.items():
        cell = runner.get(function)
        passed: bool | None = True
        reason = ""
        if cell is None:
            passed = None
            reason = lacks[function]
        else:
            try:
                result = cell()
                if inspect.iscoroutine(result):
                    asyncio.run(result)
            except Exception as error:
                passed = False
                reason = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        print(json.dumps({"cell": name, "passed": passed, "reason": reason}), flush=True)
