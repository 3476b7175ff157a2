"""Exit statuses of `penstock`."""

from __future__ import annotations

CLEAN = 0
CANNOT_LISTEN = 1
BAD_CONFIG = 2
ENGINE_DIED = 3

MEANINGS = {
    "0": "Stopped by SIGTERM, SIGINT or SIGHUP after a drain. Interrupted requests got an error.",
    "1": "The server cannot listen on this host and port, or the HTTP side cannot start.",
    "2": "A flag, environment variable, file or model is not valid.",
    "3": "The engine process died, or hung and was killed. The last line on stderr says why.",
    "129, 130, 143": "SIGHUP, SIGINT or SIGTERM came a second time, or before listening: no drain.",
}
