"""The folder where Penstock keeps what later starts reuse: machine code, converted settings."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path | None:
    """Return the folder of one kind, which may not exist; None if the user has no home."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(chosen) if chosen else Path.home() / ".cache") / "penstock" / kind
    except RuntimeError:  # no home
        return None
