"""The messages from rank 0, which schedules, to the other ranks, which follow it.

They are frozen msgspec structs, encoded as msgpack (`engine/protocol/message.py`). A follower gets
Begin once, and then one Compute for each step. If the step has sequences with a grammar, Masks
follows. If it shows images, Show comes before it. Other messages come between two steps.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.protocol.message import Message
from engine.scheduling.step import Step


class Begin(Message, frozen=True):
    """Load the model. `place` is the file where the ranks meet, `board` that of their Board."""

    rank: int
    config: EngineConfig
    place: str
    board: str


class Compute(Message, frozen=True):
    """Compute a step. With `has_masks`, its Masks follow."""

    step: Step
    has_masks: bool


class Masks(Message, frozen=True):
    """The allowed tokens of some sampling slices of the step: see TokenMasks."""

    slices: list[int]  # K indices
    words: bytes  # [K, ceil(V / 32)] int32


class Show(Message, frozen=True):
    """The next step shows images: see SeenTokens."""

    index: bytes  # [N] int64
    embeddings: bytes  # [N, width] of `dtype`
    dtype: str  # a name in torch


class Capture(Message, frozen=True):
    """Capture one more step graph."""


class ReadAdapter(Message, frozen=True):
    """Begin to read an adapter. The threads that read it agree on whether all ranks can use it."""

    adapter: int
    path: str


class PlaceAdapter(Message, frozen=True):
    """Write an adapter that all ranks have read into a slot, before the next step is computed.

    With slot 0 it is dropped. Adapter 0 clears the slot.
    """

    adapter: int
    slot: int


ToFollower = Begin | Compute | Masks | Show | Capture | ReadAdapter | PlaceAdapter
