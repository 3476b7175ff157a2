"""A rank that follows rank 0 computes the same steps on its share of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.device.board import Board
from engine.grammar.matchers import Matchers
from engine.ops.seen_tokens import SeenTokens
from engine.parallel.channel import Receiver
from engine.parallel.messages import Capture, Compute, Masks, PlaceAdapter, ReadAdapter, Show
from engine.runner.model_runner import ModelRunner
from engine.sampling.masks import LaunchedStep, LazyMasks, TokenMasks
from engine.scheduling.step import ScheduledSlice, Step


class FollowingMatchers(Matchers):
    """The matchers of a rank that follows: rank 0 computes the masks, and sends them."""

    def __init__(self, own: Matchers, receiver: Receiver) -> None:
        """Take the place of the runner's `own` matchers."""
        super().__init__(own.compiler, own.vocab_size)
        self._receiver = receiver
        self.has_masks = False  # whether masks of the step that is launched now will arrive

    def start(self, sampling: Sequence[ScheduledSlice]) -> LazyMasks | None:
        return LazyMasks(self._receive) if self.has_masks else None

    def _receive(self) -> TokenMasks:
        """Wait for the masks. Nothing else reads the channel before the step is launched."""
        message = self._receiver.receive()
        assert isinstance(message, Masks)
        words = np.frombuffer(bytearray(message.words), np.int32)
        rows = torch.from_numpy(words).view(len(message.slices), -1)
        return TokenMasks(message.slices, rows, frozenset())

    def launched(self, pending: LaunchedStep) -> None:
        """Do nothing: no matcher needs the tokens."""


class FollowingImages:
    """The embeddings of images that rank 0 sends before the step that shows them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next: SeenTokens | None = None

    def show(self, message: Show) -> None:
        index = torch.from_numpy(np.frombuffer(bytearray(message.index), np.int64))
        values = torch.from_numpy(np.frombuffer(bytearray(message.embeddings), np.uint8))
        embeddings = values.view(len(index), -1).view(getattr(torch, message.dtype))
        self._next = SeenTokens(index.to(self._device), embeddings.to(self._device))

    def __call__(self, step: Step) -> SeenTokens | None:
        """Return the tokens of a step that show images, once."""
        seen, self._next = self._next, None
        return seen


def follow(runner: ModelRunner, receiver: Receiver, board: Board) -> None:
    """Compute what rank 0 computes, until it closes the pipe. The results are dropped."""
    assert isinstance(runner.matchers, Matchers)
    matchers = FollowingMatchers(runner.matchers, receiver)
    runner.matchers = matchers
    images = FollowingImages(runner.device)
    runner.seen_tokens = images
    while True:
        board.rest()
        try:
            message = receiver.receive()
        except EOFError:
            matchers.close()
            return
        board.compute()
        match message:
            case Compute():
                matchers.has_masks = message.has_masks
                runner.launch(message.step)
            case Show():
                images.show(message)
            case Capture():
                runner.capture_when_idle()
            case ReadAdapter():
                runner.read_adapter(message.adapter, message.path)
            case PlaceAdapter():
                runner.place_adapter(message.adapter, message.slot)
            case _:
                raise AssertionError(f"unexpected: {type(message).__name__}")
