"""ModelProcess: the process that serves one model, as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from server.models.control import LONGEST_LINE, Failed, Loaded, Loading, Report, Start, UsedTokens
from server.models.pool import LoadError

STOP_S = 10.0  # from SIGTERM to SIGKILL, beyond the time that requests get to finish

UseTokens = Callable[[Mapping[str, int]], None]


@dataclass(frozen=True)
class Launcher:
    """Starts the processes. `command` gets the number of the control socket as its last argument.

    `use_tokens` receives the tokens that requests have used, by the digest of their key.
    """

    command: Sequence[str]
    use_tokens: UseTokens

    async def start(self, start: Start) -> ModelProcess:
        """Start a process. Raises LoadError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    # Ctrl-C reaches the whole group; the parent decides when models end.
                    start_new_session=True,
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        except OSError as error:
            ours.close()
            raise LoadError(f"its process cannot be started: {error.strerror}") from None
        writer.write(msgspec.json.encode(start) + b"\n")
        return ModelProcess(process, reader, writer, start, self.use_tokens)


class ModelProcess:
    """A running process. Create it in the event loop that it is used in."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        start: Start,
        use_tokens: UseTokens,
    ) -> None:
        self.socket = start.socket
        self.progress = ("starting", 0.0)
        self.pid = process.pid
        self._process = process
        self._reader, self._writer = reader, writer
        self._grace = start.server.drain_timeout + STOP_S
        self._use_tokens = use_tokens
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # seen
        self._ended = asyncio.ensure_future(self._run())

    async def _run(self) -> str:
        """Read the reports until the process has ended; return how it ended."""
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                self._take(msgspec.json.decode(line, type=Report))
        # The stream has ended or is damaged: the process has ended, or is of no use.
        self._writer.close()
        how = _how(await self._wait_or_kill())
        if not self._loaded.done():
            self._loaded.set_exception(LoadError(how))
        return how

    def _take(self, report: Report) -> None:
        match report:
            case Loading(stage=stage, fraction=fraction):
                self.progress = (stage, fraction)
            case UsedTokens(tokens=tokens):
                self._use_tokens(tokens)
            case Loaded() if not self._loaded.done():
                self._loaded.set_result(None)
            case Failed(reason=reason) if not self._loaded.done():
                self._loaded.set_exception(LoadError(reason))

    async def _wait_or_kill(self) -> int:
        try:
            async with asyncio.timeout(self._grace):
                return await self._process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            return await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait_loaded(self) -> None:
        """Wait until requests are accepted. Raises LoadError."""
        await asyncio.shield(self._loaded)

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return how."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the process and wait for its end; at last by SIGKILL."""
        self._signal(signal.SIGTERM)
        await self._wait_or_kill()
        await asyncio.shield(self._ended)

    def reload_keys(self) -> None:
        """Let the process read its key files again."""
        self._signal(signal.SIGHUP)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)


def _how(status: int) -> str:
    if status >= 0:
        return f"its process exited with status {status}"
    return f"its process was killed by signal {-status}"
