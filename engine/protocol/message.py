"""Bases of the messages between the two processes: frozen msgspec structs, encoded as msgpack."""

from __future__ import annotations

import msgspec

TokenIds = list[int]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of all messages: an array of the class name and the fields in declaration order."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the parts of messages: an array of the fields in declaration order, without a tag."""
