"""The exception of the load tests."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement, comparison or report failed; the message is shown to the user."""
