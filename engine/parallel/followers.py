"""The processes of the other ranks, as rank 0 sees them: it starts them and sends them its steps.

A follower's death is the engine's, because its share of the weights is gone. A thread waits for
each one, and interrupts the main thread with FollowerDiedError. If that does not help, because the
main thread waits for a GPU, the process exits. Another thread ends all followers if a step stalls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.config import EngineConfig
from engine.device.board import RANK_BYTES, Board
from engine.device.limits import cpu_count
from engine.device.nodes import cores_of_ranks
from engine.errors import ConfigError
from engine.parallel import stall
from engine.parallel.channel import Sender
from engine.parallel.messages import (
    Begin,
    Capture,
    Compute,
    Masks,
    PlaceAdapter,
    ReadAdapter,
    Show,
    ToFollower,
)
from engine.scheduling.step import Step

if TYPE_CHECKING:
    import torch

    from engine.device.ranks import Ranks
    from engine.ops.seen_tokens import SeenTokens
    from engine.sampling.masks import TokenMasks

INTERRUPT = signal.SIGUSR2  # tells the main thread that a follower has ended
CAUSE_S = 0.2  # seconds in which a follower's end is seen, after a collective with it has failed
LAST_WORDS_S = 0.5  # seconds for the main thread to report it
DEAD_STATUS = 3  # exit status of the engine then


class FollowerDiedError(Exception):
    """The process of another rank has ended, or has been ended because a step stalled."""


class Followers:
    """The processes of ranks 1 to `count` - 1; as a context manager, they end with it.

    Create it in the main thread, before torch is imported: Linux ends them when the thread that
    started them ends. It binds this process and theirs to the memory nodes of the machine.
    """

    def __init__(self, config: EngineConfig, command: list[str]) -> None:
        """Start them. `command` runs `engine.parallel.follower`.

        Raises ConfigError on other systems than Linux.
        """
        size = config.tensor_parallel_size
        if sys.platform != "linux":
            raise ConfigError(f"--tensor-parallel-size {size} needs Linux, not {sys.platform}.")
        # The threads of all ranks: later, this process may use fewer cores.
        self.config = replace(config, threads=config.threads or cpu_count())
        # An open file without a name: its path is that of this process's descriptor.
        self._meeting = os.memfd_create("penstock-ranks")
        self._notes = os.memfd_create("penstock-board")
        os.ftruncate(self._notes, size * RANK_BYTES)
        self.board = Board(0, size, self._path(self._notes))
        self._is_closing = self._is_reported = False
        self._stall: str | None = None  # why a step has stalled
        self._processes: list[subprocess.Popen[bytes]] = []
        # A process inherits the cores of the thread that starts it.
        own, *others = cores_of_ranks(size)
        for cores in others:
            os.sched_setaffinity(0, cores)
            process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
            self._processes.append(process)
        os.sched_setaffinity(0, own)
        self._senders: list[Sender] = []
        self._handler_before = signal.signal(INTERRUPT, self._interrupt)
        for process in self._processes:
            assert process.stdin is not None
            self._senders.append(Sender(process.stdin))
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        self._closing = threading.Event()
        self._stall_watch = threading.Thread(target=self._watch_for_stall, daemon=True)
        self._stall_watch.start()

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises FollowerDiedError if a follower's death may have caused an error."""
        self._is_closing = True
        self._closing.set()
        self._stall_watch.join()
        death = None
        if isinstance(error, RuntimeError | OSError):  # of a collective, or of a pipe
            death = self._death(CAUSE_S)
        for sender in self._senders:
            with contextlib.suppress(OSError):
                sender.close()
        for process in self._processes:
            process.kill()  # it has no work to lose
            process.wait()
        os.close(self._meeting)
        self.board.close()
        os.close(self._notes)
        signal.signal(INTERRUPT, self._handler_before)
        if death is not None:
            raise FollowerDiedError(death) from error

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if self._is_closing:
            return
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, INTERRUPT)
        time.sleep(LAST_WORDS_S)
        if not self._is_closing:
            sys.stderr.write(f"penstock: {self._death(0.0)}\n")
            os._exit(DEAD_STATUS)

    def _watch_for_stall(self) -> None:
        """End the followers if a step stalls. Then a sum of the main thread fails."""
        pids = [os.getpid(), *[process.pid for process in self._processes]]
        watch = stall.StallWatch(self.board, pids)
        while self._stall is None:
            if self._closing.wait(stall.TICK_S):
                return
            self._stall = watch.look()
        for process in self._processes:
            process.kill()  # also one that is stopped by a signal

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_closing or self._is_reported:
            return
        death = self._death(0.0)
        if death is not None:
            self._is_reported = True  # the others end too, when they miss the first
            raise FollowerDiedError(death)

    def _death(self, wait_s: float) -> str | None:
        """Return how a follower has ended, if one ends within `wait_s` seconds, or why a step had
        stalled before."""
        until = time.monotonic() + wait_s
        while True:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    return self._stall or _epitaph(rank, process.returncode)
            if time.monotonic() >= until:
                return None
            time.sleep(0.01)

    # ---- messages ----------------------------------------------------------------------------

    def connect(self, ranks: Ranks, device: torch.device) -> None:
        """Let the followers load the model, and connect with them."""
        place, board = self._path(self._meeting), self._path(self._notes)
        for rank, sender in enumerate(self._senders, start=1):
            sender.send(Begin(rank, self.config, place, board))
        ranks.connect(device, place, self.board)

    def _path(self, file: int) -> str:
        """Return a path of an open file of this process, for other processes."""
        return f"/proc/{os.getpid()}/fd/{file}"

    def compute(self, step: Step, *, has_masks: bool) -> None:
        self.board.compute()
        self._send(Compute(step, has_masks))

    def mask(self, masks: TokenMasks) -> None:
        self._send(Masks(masks.slices, masks.words.numpy().tobytes()))

    def show(self, seen: SeenTokens) -> None:
        self._send(shown(seen))

    def capture(self) -> None:
        self.board.compute()
        self._send(Capture())

    def read_adapter(self, adapter: int, path: str) -> None:
        self._send(ReadAdapter(adapter, path))

    def place_adapter(self, adapter: int, slot: int) -> None:
        self._send(PlaceAdapter(adapter, slot))

    def wait(self) -> None:
        self.board.wait()

    def rest(self) -> None:
        self.board.rest()

    def _send(self, message: ToFollower) -> None:
        frame = self._senders[0].encoded(message)
        for sender in self._senders:
            sender.send_encoded(frame)


def shown(seen: SeenTokens) -> Show:
    """Return the message with the embeddings of images that the next step reads."""
    import torch  # not above: see Followers

    index, embeddings = seen.index.cpu(), seen.embeddings.cpu().contiguous()
    return Show(
        index.numpy().tobytes(),
        embeddings.view(torch.uint8).numpy().tobytes(),
        str(embeddings.dtype).removeprefix("torch."),
    )


def _epitaph(rank: int, code: int) -> str:
    if code < 0:
        return f"The process of rank {rank} was killed by signal {-code}."
    return f"The process of rank {rank} exited with status {code}."
