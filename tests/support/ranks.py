"""Two ranks in this process: a driver of rank 0, and a thread that follows it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.device.board import Board
from engine.device.ranks import Ranks
from engine.ops.seen_tokens import SeenTokens
from engine.parallel.channel import Receiver, Sender
from engine.parallel.follow import follow
from engine.parallel.followers import shown
from engine.parallel.messages import (
    Capture,
    Compute,
    Masks,
    PlaceAdapter,
    ReadAdapter,
    ToFollower,
)
from engine.runner.load import load_engine
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import Step
from tests.support.driver import Driver


def in_threads(
    count: int, place: Path, work: Callable[[Ranks], torch.Tensor]
) -> list[torch.Tensor]:
    """Return what each of `count` connected ranks computes. Raises the first error of a rank."""
    all_ranks = [Ranks(own, count) for own in range(count)]
    connected = threading.Barrier(count)
    found: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []

    def run(ranks: Ranks) -> None:
        try:
            ranks.connect(torch.device("cpu"), str(place))
            # A rank whose work needs no other would end, and close its connections, while others
            # still connect. Then gloo's connectFullMesh fails in these.
            connected.wait()
            found[ranks.own] = work(ranks)
        except BaseException as error:
            failures.append(error)
            connected.abort()
            ranks._group = None  # closes its connections: the others would wait for it

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in all_ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [found[own] for own in range(count)]


class ThreadFollowers:
    """The Followers of a runner in threads of this process."""

    def __init__(self, config: EngineConfig, place: Path) -> None:
        self._place = str(place)
        self.board = Board()
        self._senders: list[Sender] = []
        self._threads: list[threading.Thread] = []
        self.runners: dict[int, ModelRunner] = {}
        self.failures: list[BaseException] = []
        for rank in range(1, config.tensor_parallel_size):
            reading, writing = os.pipe()
            self._senders.append(Sender(os.fdopen(writing, "wb", buffering=0)))
            thread = threading.Thread(target=self._follow, args=(config, rank, reading))
            self._threads.append(thread)
            thread.start()

    def _follow(self, config: EngineConfig, rank: int, reading: int) -> None:
        torch.set_num_threads(1)
        with os.fdopen(reading, "rb") as pipe:
            try:
                self.runners[rank] = load_engine(config, rank=rank, connect=self.connect).runner
                follow(self.runners[rank], Receiver(pipe), Board(rank, config.tensor_parallel_size))
            except BaseException as error:
                self.failures.append(error)

    def connect(self, ranks: Ranks, device: torch.device) -> None:
        ranks.connect(device, self._place)

    def compute(self, step: Step, *, has_masks: bool) -> None:
        self._send(Compute(step, has_masks))

    def mask(self, masks: Any) -> None:
        self._send(Masks(masks.slices, masks.words.numpy().tobytes()))

    def show(self, seen: SeenTokens) -> None:
        self._send(shown(seen))

    def capture(self) -> None:
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
        assert not self.failures
        for sender in self._senders:
            sender.send(message)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        for thread in self._threads:
            thread.join()
        assert not self.failures


@contextmanager
def ranked(model: Path, place: Path, size: int = 2, **config: Any) -> Iterator[Driver]:
    """Yield a driver of an engine with `size` ranks. `place` is the path of a new file."""
    fields = {"dtype": "float32", "threads": 1, "device": "cpu", "tensor_parallel_size": size}
    followers = ThreadFollowers(EngineConfig(model=str(model), **(fields | config)), place)
    try:
        driver = Driver(model, tensor_parallel_size=size, connect=followers.connect, **config)
        driver.runner.lead(followers)
        yield driver
    finally:
        followers.close()
    check_rows(driver.runner, followers.runners)


def check_rows(leader: ModelRunner, runners: dict[int, ModelRunner]) -> None:
    """Check that all ranks know the same tokens."""
    for runner in runners.values():
        assert torch.equal(leader.rows.tokens, runner.rows.tokens)
        assert torch.equal(leader.rows.lengths, runner.rows.lengths)
