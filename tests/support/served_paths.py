"""Paths of wings in tests of the spine. The tests of a wing check that it has its paths."""

from __future__ import annotations

from server.app import PATHS


def served_paths(*paths: str) -> list[str]:
    """Return those of `paths` that the application serves: a wing may have been deleted."""
    return [path for path in paths if path in PATHS]
