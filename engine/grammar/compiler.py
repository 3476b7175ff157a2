"""Compile grammars with llguidance (github.com/guidance-ai/llguidance), each in its own process.

Tenants take turns, so that one with many large grammars does not delay another. A tenant's
processes share a part of the memory for grammars. Idle ones are kept for the next request with the
same grammar, until the memory is needed.
"""

from __future__ import annotations

import select
import signal
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from engine.errors import RequestRejectedError
from engine.grammar import limits
from engine.grammar.connection import Connection, ForkerProcess
from engine.grammar.messages import Advance, Allowed, Close, Compile, Compiled, Ended, Open, Try
from engine.protocol.generate import Grammar

TOO_LATE = "The grammars of other requests took too long to compile; retry later."
RESTARTED = "The process that compiles grammars was started again; retry later."
UNUSABLE = "The answer cannot be held to this grammar"
IDLE_PROCESSES = 8  # kept for later requests; each counts its own memory, of 3 MiB or more
CREDIT_S = 0.01  # for which steps may wait for a process, until it answers again
CREDIT_OF_ANSWER_S = 0.0002
SLOW_S = 0.02  # CPU time of an answer, after which a process yields to all others


@dataclass(eq=False)
class GrammarProcess:
    """The process of one grammar of a tenant, as the engine sees it."""

    number: int
    tenant: str
    grammar: Grammar
    connection: Connection | None = None  # None: it waits for its turn
    queued_at: float = field(default_factory=time.monotonic)
    turn: int = 0  # grows with each start
    is_compiled: bool = False
    is_slow: bool = False
    refusal: RequestRejectedError | None = None  # it has ended, or never begins
    kill_reason: str = ""
    num_bytes: int = limits.GRAMMAR_BYTES + limits.STACK_BYTES  # until it is compiled
    credit: float = CREDIT_S
    answers: set[int] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        return self.is_compiled and not self.answers

    @property
    def is_late(self) -> bool:
        """Whether steps do not wait for its masks any more."""
        return self.is_slow or self.credit <= 0

    def wait(self, seconds: float) -> None:
        """Count the time that a step has waited for the process."""
        self.credit = max(self.credit - seconds, -CREDIT_S)

    def send(self, message: Advance | Try) -> None:
        assert self.connection is not None
        self.connection.send(message)


class IdleForker(NamedTuple):
    """The CPU time of a forker that was to kill a process, and since when it is the same."""

    ticks: int
    since: float


class GrammarCompiler:
    """The processes of all grammars, for a tokenizer file and a model with `vocab_size` logits."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.allowed: list[Allowed] = []  # received, and not taken yet
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._forker: ForkerProcess | None = None  # started with the first grammar
        self._idle_forker: IdleForker | None = None
        self._processes: OrderedDict[int, GrammarProcess] = OrderedDict()  # running, oldest use
        self._by_grammar: dict[tuple[str, Grammar], GrammarProcess] = {}
        self._queues: dict[str, list[GrammarProcess]] = {}  # by tenant
        self._forker_bytes = 0
        self._count = self._turns = 0

    # ---- answers -----------------------------------------------------------------------------

    def open(self, tenant: str, grammar: Grammar, answer: int) -> GrammarProcess:
        """Return the process that will follow the grammar of a new answer."""
        process = self._by_grammar.get((tenant, grammar))
        if process is None:
            self._count += 1
            process = GrammarProcess(self._count, tenant, grammar)
            if len(grammar.source) > limits.MAX_SOURCE_BYTES:
                size, most = len(grammar.source), limits.MAX_SOURCE_BYTES
                process.refusal = _refusal(grammar, f"it has {size} bytes, and the limit is {most}")
                return process
            self._by_grammar[tenant, grammar] = process
            self._queues.setdefault(tenant, []).append(process)
        process.answers.add(answer)
        if process.connection is not None:
            process.connection.send(Open(answer, 0))
            self._processes.move_to_end(process.number)
        self._start_queued()
        return process

    def close_answer(self, process: GrammarProcess, answer: int) -> None:
        """Forget an answer. A process without answers is idle, or stops compiling."""
        process.answers.discard(answer)
        if process.connection is not None and process.refusal is None:
            process.connection.send(Close(answer), has_answer=False)
            if not process.answers and not process.is_compiled:
                self._kill(process, "it was aborted")
        elif not process.answers:
            self._forget(process)
        self._trim()

    # ---- progress ----------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a grammar waits, or is being compiled."""
        return bool(self._queues) or any(not p.is_compiled for p in self._processes.values())

    def poll(self, timeout: float = 0.0) -> None:
        """Take the messages of all processes; wait up to `timeout` seconds for the first."""
        if self._forker is not None:
            self._receive(self._forker, timeout)
        now = time.monotonic()
        for process in list(self._processes.values()):
            assert process.connection is not None
            since = process.connection.awaited_since
            if since is not None and now - since > limits.CALL_S and not process.kill_reason:
                self._end(process, _late(process))  # the forker may not report the end
                self._kill(process, "it was late")
        if self._is_forker_stuck(now):
            self._restart()
        self._trim()
        self._start_queued()

    def _is_forker_stuck(self, now: float) -> bool:
        """Return whether the forker does nothing for END_S, although it was to kill a process.

        One that reads a large tokenizer on a busy machine is slow, and not stuck.
        """
        if self._forker is None or not any(p.kill_reason for p in self._processes.values()):
            self._idle_forker = None
            return False
        ticks = self._forker.cpu_ticks
        if self._idle_forker is None or self._idle_forker.ticks != ticks:
            self._idle_forker = IdleForker(ticks, now)
        return now - self._idle_forker.since > limits.END_S

    def _receive(self, forker: ForkerProcess, timeout: float) -> None:
        poll = select.poll()
        poll.register(forker.control, select.POLLIN)
        by_file = {}
        for process in self._processes.values():
            connection = process.connection
            assert connection is not None
            if connection.num_awaited:
                events = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
                poll.register(connection.socket, events)
                by_file[connection.socket.fileno()] = process
        for file, _ in poll.poll(timeout * 1000):
            if file in by_file:
                self._take_messages(by_file[file])
        ended = forker.ended()
        if ended is None:
            self._restart()
            return
        for message in ended:
            self._take_end(message)

    def _take_messages(self, process: GrammarProcess) -> None:
        connection = process.connection
        assert connection is not None
        connection.flush()
        for message in connection.receive():
            process.num_bytes = message.num_bytes
            if isinstance(message, Compiled):
                process.is_compiled = True
                if message.problem:
                    self._end(process, _refusal(process.grammar, message.problem))
                    self._kill(process, "it was refused")
                    return
            else:
                process.credit = min(process.credit + CREDIT_OF_ANSWER_S, CREDIT_S)
                self.allowed.append(message)
                if message.seconds > SLOW_S and not process.is_slow and self._forker is not None:
                    process.is_slow = True
                    self._forker.slow_down(process.number)
            if process.num_bytes > limits.GRAMMAR_BYTES:
                self._kill(process, _over_memory(limits.GRAMMAR_BYTES))

    # ---- ends --------------------------------------------------------------------------------

    def _kill(self, process: GrammarProcess, why: str) -> None:
        if not process.kill_reason and self._forker is not None:
            process.kill_reason = why
            self._forker.kill(process.number)
            self._forget(process)

    def _take_end(self, message: Ended) -> None:
        process = self._processes.get(message.process)
        if process is None:
            return
        del self._processes[process.number]
        why = process.kill_reason or _why_it_ended(message.status, process.is_compiled)
        self._end(process, process.refusal or _refusal(process.grammar, why))

    def _end(self, process: GrammarProcess, refusal: RequestRejectedError) -> None:
        process.refusal = refusal
        if process.number not in self._processes and process.connection is not None:
            process.connection.close()
        self._forget(process)

    def _forget(self, process: GrammarProcess) -> None:
        """Let later requests with the same grammar begin again."""
        key = process.tenant, process.grammar
        if self._by_grammar.get(key) is process:
            del self._by_grammar[key]
        queue = self._queues.get(process.tenant, [])
        if process in queue:
            queue.remove(process)
            if not queue:
                del self._queues[process.tenant]

    def _restart(self) -> None:
        """End the forker, if it has not ended, and its processes with it. A start makes another."""
        self.close()
        for process in list(self._processes.values()):
            if process.refusal is None:
                param = process.grammar.param
                process.refusal = RequestRejectedError("server_overloaded", RESTARTED, param)
            self._take_end(Ended(process.number, -signal.SIGKILL))

    # ---- memory and turns --------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """The memory that all grammars hold."""
        return _sum_bytes(self._processes.values()) + self._forker_bytes

    def _trim(self) -> None:
        """End idle processes, and then large ones, until the others are within the limits."""
        idle = [p for p in self._running() if p.is_idle]
        for process in idle[: max(0, len(idle) - IDLE_PROCESSES)]:
            self._kill(process, "it was idle")
        while (over := self._over_limit()) is not None:
            processes, reason = over
            victim = next((p for p in processes if p.is_idle), None)
            self._kill(victim or max(processes, key=lambda p: p.num_bytes), reason)

    def _over_limit(self) -> tuple[list[GrammarProcess], str] | None:
        """Return the processes of a tenant that must end one of them, and why."""
        of_tenants: dict[str, list[GrammarProcess]] = {}
        for process in self._running():
            of_tenants.setdefault(process.tenant, []).append(process)
        if not of_tenants:
            return None
        held = {tenant: _sum_bytes(those) for tenant, those in of_tenants.items()}
        largest = max(held, key=lambda tenant: held[tenant])
        if held[largest] > limits.TENANT_BYTES:
            return of_tenants[largest], _over_memory(limits.TENANT_BYTES, "grammars of one API key")
        if sum(held.values()) + self._forker_bytes > limits.ALL_BYTES:
            return of_tenants[largest], _over_memory(limits.ALL_BYTES, "grammars of all requests")
        return None

    def _running(self) -> list[GrammarProcess]:
        return [p for p in self._processes.values() if not p.kill_reason]

    def _start_queued(self) -> None:
        """Start the next grammars, one of a tenant at a time. Refuse those that waited too long."""
        for process in list(chain(*self._queues.values())):
            if time.monotonic() - process.queued_at > limits.QUEUE_S:
                late = RequestRejectedError("server_overloaded", TOO_LATE, process.grammar.param)
                self._end(process, late)
        turns = {process.tenant: 0 for process in chain(*self._queues.values())}
        for running in self._processes.values():
            turns[running.tenant] = max(turns.get(running.tenant, 0), running.turn)
        for tenant in sorted(self._queues, key=lambda each: turns[each]):
            compiling = {p.tenant for p in self._processes.values() if not p.is_compiled}
            if len(compiling) >= limits.MOST_COMPILING:
                return
            if tenant in compiling or not self._has_room(tenant):
                continue
            process = self._queues[tenant].pop(0)
            if not self._queues[tenant]:
                del self._queues[tenant]
            self._start(process)

    def _has_room(self, tenant: str) -> bool:
        """Return whether one more grammar fits. If not, end an idle one, which takes a while."""
        new = limits.GRAMMAR_BYTES + limits.STACK_BYTES
        everyone = list(self._processes.values())
        own = [process for process in everyone if process.tenant == tenant]
        if _sum_bytes(own) + new > limits.TENANT_BYTES:
            crowd = own
        elif _sum_bytes(everyone) + new + self._forker_bytes > limits.ALL_BYTES:
            crowd = everyone
        else:
            return True
        idle = next((process for process in crowd if process.is_idle), None)
        if idle is not None and not any(process.kill_reason for process in crowd):
            self._kill(idle, "it was idle")
        return False

    def _start(self, process: GrammarProcess) -> None:
        if self._forker is None:
            self._forker = ForkerProcess(self._file, self._vocab_size)
        process.connection = self._forker.start(process.number, process.grammar.end_token_ids)
        self._forker_bytes = self._forker.num_bytes
        self._turns += 1
        process.turn = self._turns
        self._processes[process.number] = process
        process.connection.send(Compile(process.grammar.source))
        for answer in process.answers:
            process.connection.send(Open(answer, 0))

    def close(self) -> None:
        if self._forker is not None:
            self._forker.close()
            self._forker = None


def _sum_bytes(processes: Iterable[GrammarProcess]) -> int:
    return sum(process.num_bytes for process in processes)


def _late(process: GrammarProcess) -> RequestRejectedError:
    """Return the error for a call over CALL_S. Its CPU time was within the limit."""
    why = f"it took more than {limits.CALL_S:g} s"
    if process.is_compiled:
        return _refusal(process.grammar, why)
    message = f"The grammar is not compiled: {why}; retry later."
    return RequestRejectedError("server_overloaded", message, process.grammar.param)


def _over_memory(most: int, of: str = "it") -> str:
    return f"{of} took more than {most >> 20} MiB of memory"


def _why_it_ended(status: int, is_compiled: bool) -> str:
    if status == -signal.SIGPROF:
        limit = limits.CALL_CPU_S if is_compiled else limits.COMPILE_CPU_S
        return f"it took more than {limit:g} s of CPU time"
    if status in (limits.NO_MEMORY_STATUS, -signal.SIGABRT):  # Rust aborts if it gets no memory
        return _over_memory(limits.GRAMMAR_BYTES)
    if status == -signal.SIGSEGV:
        return f"it is nested too deeply for a stack of {limits.STACK_BYTES >> 20} MiB"
    return f"its process ended with status {status}"


def _refusal(grammar: Grammar, why: str) -> RequestRejectedError:
    """Return the error for llguidance's message, whose other lines draw the place or a state."""
    lines = [line.strip() for line in why.strip().splitlines()] or ["no reason given"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = " ".join([lines[0], *causes])[:500].rstrip(".")
    return RequestRejectedError("invalid_grammar", f"{UNUSABLE}: {text}.", grammar.param)
