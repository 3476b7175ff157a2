"""What a measurement gives back."""

from __future__ import annotations

import weakref

from engine.runner.recorder import _no_collection
from engine.runner.reserve import release


class Engine:
    """As the core and its endpoint, it knows itself."""

    def __init__(self) -> None:
        self.core = self


def test_an_engine_that_a_recording_has_frozen_is_given_back() -> None:
    """Its KV cache has most of the card: without it the next one of the process would not start."""
    engine = Engine()
    with _no_collection():
        pass
    gone = weakref.ref(engine)
    del engine
    release()
    assert gone() is None
