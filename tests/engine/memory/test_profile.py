"""Memory that `release_memory` frees after a measurement."""

from __future__ import annotations

import weakref

from engine.memory.profile import release_memory
from engine.runner.recorder import _no_collection


class Engine:
    """An object in a reference cycle, like the core and its endpoint."""

    def __init__(self) -> None:
        self.core = self


def test_release_frees_engine_frozen_by_a_capture() -> None:
    """Its KV cache has most of the GPU's memory: the next engine of the process would not start."""
    engine = Engine()
    with _no_collection():
        pass
    gone = weakref.ref(engine)
    del engine
    release_memory()
    assert gone() is None
