"""Messages to the other ranks arrive whole and in order, and the end of the sender is seen."""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.parallel.channel import Receiver, Sender
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
from engine.protocol.generate import Explain, Grammar, SamplingParams
from engine.scheduling.step import (
    BlockCopy,
    NewBlocks,
    NewDraft,
    NewRow,
    PrefillChunk,
    ScheduledSlice,
    Step,
)


def full_step() -> Step:
    """A step with something in every field that a decoder uses, larger than a pipe's buffer."""
    grammar = Grammar("{}", (2,), "response_format")
    params = SamplingParams(9, 0.5, logit_bias=((3, -1.5),), grammar=grammar)
    tokens = tuple(range(60_000))
    return Step(
        slices=(ScheduledSlice(7, 1, 0, 3, 1, True, draft=4), ScheduledSlice(8, 0, 2, 0, 5, False)),
        new_rows=(NewRow(2, tokens, 5, params, explain=Explain([4, 5], params, 3)),),
        new_blocks=(NewBlocks(2, 0, 1, (9, 10)),),
        new_drafts=(NewDraft(0, 3, (4,)),),
        scrub=(9,),
        copies=(BlockCopy(1, 9, 16, 0),),
        prefills=(PrefillChunk(8, 0, 5),),
    )


def test_messages_arrive_as_they_were_sent() -> None:
    sent: list[ToFollower] = [
        Begin(1, EngineConfig(threads=3, tensor_parallel_size=2), "/proc/1/fd/3", "/proc/1/fd/4"),
        Compute(full_step(), has_masks=True),
        Masks([0, 2], b"\x01\x00\x00\x80" * 2),
        Show(b"\x01" * 8, b"\x00\x3f", "bfloat16"),
        Capture(),
        ReadAdapter(3, "/adapters/french"),
        PlaceAdapter(3, 1),
    ]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        sender, receiver = Sender(os.fdopen(writing, "wb", buffering=0)), Receiver(pipe)
        thread = threading.Thread(target=lambda: [sender.send(message) for message in sent])
        thread.start()
        assert [receiver.receive() for _ in sent] == sent
        thread.join()
        sender.close()
        with pytest.raises(EOFError):
            receiver.receive()


def test_message_that_is_cut_off_raises_eof_error() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        sender = Sender(os.fdopen(writing, "wb", buffering=0))
        sender.send_encoded(sender.encoded(Capture())[:-1])
        sender.close()
        with pytest.raises(EOFError):
            Receiver(pipe).receive()


class Narrow(io.BytesIO):
    """A pipe that takes 7 bytes at a time, as a full pipe does."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:7])


def test_message_through_a_pipe_that_takes_a_part_arrives_whole() -> None:
    pipe = Narrow()
    message = ReadAdapter(3, "/a/long/path/to/an/adapter")
    Sender(pipe).send(message)
    Sender(pipe).send(Capture())
    receiver = Receiver(io.BytesIO(pipe.getvalue()))
    assert receiver.receive() == message
    assert receiver.receive() == Capture()
    with pytest.raises(EOFError):
        receiver.receive()
