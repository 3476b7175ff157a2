"""Exit statuses of `penstock`, for supervisors and for people."""

from __future__ import annotations

CLEAN = 0
CANNOT_LISTEN = 1
BAD_CONFIG = 2
ENGINE_DIED = 3

MEANINGS = {
    "0": "Stopped by SIGTERM, SIGINT or SIGHUP after a drain; whom it cut off was told so.",
    "1": "The port or host cannot be listened on, or the HTTP side cannot start.",
    "2": "A flag, variable, file or model cannot be used as it was given.",
    "3": "The engine process died, or hung and was ended; the last line on stderr says why.",
    "129, 130, 143": "A second SIGHUP, SIGINT or SIGTERM, or one before it listened: no drain.",
}
