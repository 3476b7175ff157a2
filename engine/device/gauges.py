"""The measurements of the engine process that /metrics exports."""

from __future__ import annotations

import time

from engine.device.limits import resident_memory
from engine.device.openmp_wait import OpenMPWait

MEMORY_INTERVAL = 1.0  # seconds between two readings of this process's memory


class ProcessGauges:
    """Returns the measurements by name. It reads the memory once in MEMORY_INTERVAL."""

    def __init__(self, openmp_wait: OpenMPWait) -> None:
        self._openmp_wait = openmp_wait
        self._resident, self._resident_at = 0, -MEMORY_INTERVAL

    def __call__(self) -> dict[str, float]:
        now = time.monotonic()
        if now - self._resident_at > MEMORY_INTERVAL:
            self._resident, self._resident_at = resident_memory(), now
        return {"engine_resident_memory_bytes": self._resident, **self._openmp_wait.gauges()}
