"""The processes that compile and follow grammars: `python -m engine.grammar.process FILE VOCAB`.

A grammar comes from a client, and llguidance may need seconds and gigabytes for it, or crash. So
each has a process of its own, with limits on its memory and on the CPU time of each call. Linux
ends a process that is over a limit. The first process reads the tokenizer and forks the others,
which share its memory; a fork takes 1 ms.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.limits import (
    CALL_CPU_S,
    COMPILE_CPU_S,
    GRAMMAR_BYTES,
    NO_MEMORY_STATUS,
    STACK_BYTES,
)
from engine.grammar.messages import (
    Advance,
    Allowed,
    Close,
    Compile,
    Compiled,
    Ended,
    FromProcess,
    Kill,
    Open,
    Slow,
    Start,
    ToForker,
    ToProcess,
    Try,
    encode,
    framed,
    received,
)

NICEST = 19  # the priority while a grammar is compiled
NICE_CPU_S = 0.05  # then it is compiled with what no other thread of the machine wants
LOOK_S = 0.02
MAX_FORCED = 16  # tokens
QUICK_S = 0.001  # finding forced tokens must not take longer
PRIVATE_BYTES = 3 << 20  # pages of the parent that a process writes to
PACKET_BYTES = 1 << 16


class Answer:
    """One answer, as a matcher follows it.

    `first` is the matcher before the first token. llguidance has a rollback, but its masks behind
    it allow tokens that the grammar does not (findings/llguidance_rollback.sh). So going back is to
    begin again, at 1 µs for each token.
    """

    def __init__(self, first: LLMatcher) -> None:
        self._first = first
        self._tokens: list[int] = []
        self.matcher = first.deep_copy()
        self.problem = ""

    def copy(self) -> Answer:
        """Return an answer at this place, which goes on without changing this one."""
        copied = Answer(self.matcher)
        copied.problem = self.problem
        return copied

    def check(self) -> None:
        if not self.problem and self.matcher.is_error():
            self.problem = self.matcher.get_error() or "unknown error"

    def take(self, tokens: list[int], rollback: int = 0) -> None:
        if not self.problem and rollback:
            tokens = [*self._tokens[:-rollback], *tokens]
            self._tokens = []
            self.matcher = self._first.deep_copy()
        for token in tokens:
            self.check()
            if self.problem:
                return
            self.matcher.consume_token(token)
            self._tokens.append(token)
        self.check()

    def mask(self) -> bytes:
        """Return the mask at this place; b"" if the grammar cannot go on."""
        self.check()
        if self.problem:
            return b""
        words = self.matcher.compute_bitmask()
        self.check()
        return b"" if self.problem else words


class GrammarHost:
    """Follows one grammar for the messages of a socket."""

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer | str) -> None:
        self._connection = connection
        self._tokenizer = tokenizer  # or why there is none
        self._before = resident_bytes()
        self._first: LLMatcher | None = None
        self._answers: dict[int, Answer] = {}
        self._finds_forced = True

    def serve(self) -> None:
        decode = msgspec.msgpack.Decoder(ToProcess).decode
        for data in received(self._connection):
            message = decode(data)
            limit = COMPILE_CPU_S if isinstance(message, Compile) else CALL_CPU_S
            signal.setitimer(signal.ITIMER_PROF, limit)
            reply = self._handle(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if reply is not None:
                self._connection.sendall(framed(reply))

    def _handle(self, message: ToProcess) -> FromProcess | None:
        begin = time.process_time()
        match message:
            case Compile():
                return Compiled(on_deep_thread(self._compile, message.source), self._held())
            case Close():
                del self._answers[message.answer]
                return None
            case Open():
                if self._first is None:  # refused, which the engine has not read yet
                    return None
                answer = Answer(self._first)
                self._answers[message.answer] = answer
                masks = [answer.mask()]
            case Advance():
                answer = self._answers[message.answer]
                masks = self._advance(answer, message)
            case Try():
                answer = self._answers[message.answer]
                masks = self._try(answer, message.tokens)
        forced = [] if isinstance(message, Try) else self._forced(answer)
        seconds = time.process_time() - begin
        return Allowed(
            message.answer, message.serial, masks, forced, answer.problem, self._held(), seconds
        )

    def _compile(self, source: str) -> str:
        """Compile the grammar, and compute the first mask, which finds what is too large."""
        if isinstance(self._tokenizer, str):
            return self._tokenizer
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error() or "unknown error"
        self._first = matcher
        return ""

    def _advance(self, answer: Answer, message: Advance) -> list[bytes]:
        if not message.each:
            answer.take(message.tokens, message.rollback)
            return [answer.mask()]
        answer.take([], message.rollback)
        masks = []
        for token in message.tokens:
            masks.append(answer.mask())
            answer.take([token])
        return [*masks, answer.mask()]

    def _try(self, answer: Answer, draft: list[int]) -> list[bytes]:
        trial = answer.copy()
        masks: list[bytes] = []
        if trial.problem:
            return masks
        count = trial.matcher.validate_tokens(draft)
        for token in draft[:count]:
            trial.take([token])
            masks.append(trial.mask())
        return masks if masks.count(b"") == 0 else masks[: masks.index(b"")]

    def _forced(self, answer: Answer) -> list[int]:
        if answer.problem or not self._finds_forced:
            return []
        begin = time.process_time()
        tokens = answer.matcher.compute_ff_tokens()
        self._finds_forced = time.process_time() - begin < QUICK_S
        return tokens[:MAX_FORCED]

    def _held(self) -> int:
        return resident_bytes() - self._before + PRIVATE_BYTES


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def address_space() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def on_deep_thread(work: Any, source: str) -> str:
    """Run `work` with a large stack and a low priority; return its result, or why it failed.

    llguidance recurses from rule to rule. Under a low priority, a thread that becomes ready still
    waits for the end of this one's time slice, milliseconds in each step. Under SCHED_IDLE it
    does not. But then a busy machine leaves so little that small grammars would wait for seconds.
    """
    results: list[str] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICEST)
        try:
            results.append(work(source))
        except MemoryError:
            os._exit(NO_MEMORY_STATUS)
        except BaseException as error:  # a Rust panic is no Exception
            results.append(f"llguidance failed: {error}")

    usual = threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    threading.stack_size(usual)
    end = time.process_time() + NICE_CPU_S
    while thread.is_alive() and time.process_time() < end:
        thread.join(LOOK_S)
    if thread.is_alive() and thread.native_id is not None:
        yield_processor(thread.native_id)
    thread.join()
    return results[0]


def yield_processor(thread: int) -> None:
    """Let a thread, or the first thread of a process, run only when no other thread wants to."""
    with contextlib.suppress(ProcessLookupError):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def become_host(connection: socket.socket, tokenizer: LLTokenizer | str) -> None:
    """Follow a grammar in this process, and end it."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        most = address_space() + GRAMMAR_BYTES + STACK_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        GrammarHost(connection, tokenizer).serve()
        status = 0
    except MemoryError:
        status = NO_MEMORY_STATUS
    finally:
        os._exit(status)


class Forker:
    """Reads tokenizers and forks the processes of grammars."""

    def __init__(self, control: socket.socket, file: Path, vocab_size: int) -> None:
        self._control = control
        self._file = file
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer | str] = {}
        self._processes: dict[int, int] = {}  # numbers by process id

    def run(self) -> None:
        control = self._control.fileno()
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        decode = msgspec.msgpack.Decoder(ToForker).decode
        while True:
            readable, _, _ = select.select([control, wake], [], [])
            if wake in readable:
                os.read(wake, PACKET_BYTES)
                self._report_ended()
            if control not in readable:
                continue
            try:
                data, sockets, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
            except ConnectionResetError:
                break
            if not data:
                break
            match decode(data):
                case Start(process, ends):
                    self._start(process, ends, socket.socket(fileno=sockets[0]))
                case Kill(process):
                    self._each(process, lambda pid: os.kill(pid, signal.SIGKILL))
                case Slow(process):
                    self._each(process, yield_processor)
        for pid in self._processes:
            os.kill(pid, signal.SIGKILL)

    def _each(self, process: int, work: Any) -> None:
        """Call `work` for a process if it has not been reported as ended."""
        for pid, number in self._processes.items():
            if number == process:
                work(pid)

    def _start(self, process: int, ends: tuple[int, ...], connection: socket.socket) -> None:
        tokenizer = self._tokenizer(ends)
        gc.freeze()
        try:
            pid = os.fork()
        except OSError as error:
            self._control.send(encode(Ended(process, error.errno or 1)))
            return
        if pid == 0:
            self._control.close()
            become_host(connection, tokenizer)
        connection.close()
        self._processes[pid] = process

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer | str:
        if ends not in self._tokenizers:
            try:
                text = self._file.read_text(encoding="utf-8")
                made = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(ends))
            except BaseException as error:  # a Rust panic is no Exception
                return f"llguidance failed: {error}"
            self._tokenizers[ends] = made
        return self._tokenizers[ends]

    def _report_ended(self) -> None:
        for pid in list(self._processes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                process = self._processes.pop(pid)
                self._control.send(encode(Ended(process, os.waitstatus_to_exitcode(status))))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the server's terminal
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Forker(socket.socket(fileno=0), Path(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
