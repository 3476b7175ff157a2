"""The messages from rank 0, which schedules, to the other ranks, which follow it.

They are frozen msgspec structs, encoded as msgpack (`engine/message.py`). A follower gets Begin
once, and then one Compute for each step. If the step has sequences with a grammar, Masks follows.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.message import Message
from engine.scheduling.step import Step


class Begin(Message, frozen=True):
    """Load the model. `place` is the file where the ranks meet."""

    rank: int
    config: EngineConfig
    place: str


class Compute(Message, frozen=True):
    """Compute a step. With `has_masks`, its Masks follow."""

    step: Step
    has_masks: bool


class Masks(Message, frozen=True):
    """The allowed tokens of some sampling slices of the step: see TokenMasks."""

    slices: list[int]  # K indices
    words: bytes  # [K, ceil(V / 32)] int32


class Capture(Message, frozen=True):
    """Capture one more step graph."""


ToFollower = Begin | Compute | Masks | Capture
