"""The one exception of the load tests."""

from __future__ import annotations


class BenchError(Exception):
    """Why nothing can be measured, compared or written, for the user to read."""
