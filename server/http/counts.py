"""The parts of a server that the middleware needs; it may have an engine or stand before others."""

from __future__ import annotations

from typing import Protocol


class HasState(Protocol):
    """A server, or the client of its engine."""

    @property
    def state(self) -> str:
        """`draining` while no new request is accepted."""


class RequestCounts(Protocol):
    """Counts what the middleware answers."""

    def request(self, status: int) -> None:
        """Count an answer by its status."""

    def reject(self, code: str) -> None:
        """Count an answer with an error by its code, which is a literal."""
