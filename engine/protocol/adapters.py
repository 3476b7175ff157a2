"""The messages that load and unload LoRA adapters while the engine serves."""

from __future__ import annotations

from engine.protocol.message import Message


class LoadAdapter(Message, frozen=True):
    """Read and check an adapter, which requests may name from then on.

    It takes a slot if one is free or unused. AdapterLoaded answers.
    """

    id: int  # from the same numbers as those of requests
    adapter: int  # never reused, not even for an adapter of the same name
    path: str


class AdapterLoaded(Message, frozen=True):
    """The answer to a LoadAdapter; `problem` says why it was refused."""

    id: int
    problem: str = ""


class UnloadAdapter(Message, frozen=True):
    """Forget an adapter once the requests that use it have ended. It may be unknown."""

    adapter: int
