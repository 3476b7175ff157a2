"""Limits of keys in the server of one model: its parent holds them for all models together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.http.key_limits import ApiKey
from server.http.rate_limits import RateLimiter

REPORT_S = 0.1  # between two reports of used tokens


class UsedTokenReports:
    """Collects the tokens that keys use, and sends sums of them to the parent."""

    def __init__(self, send: Callable[[dict[str, int]], None]) -> None:
        self._send = send
        self._tokens: dict[str, int] = {}  # by the digest of a key, since the last report

    def limiter(self, key: ApiKey) -> RateLimiter:
        """Return the limiter of a key. It refuses nothing."""
        return ReportingLimiter(key, self)

    def use(self, name: str, count: int) -> None:
        if not self._tokens:
            asyncio.get_running_loop().call_later(REPORT_S, self._report)
        self._tokens[name] = self._tokens.get(name, 0) + count

    def _report(self) -> None:
        tokens, self._tokens = self._tokens, {}
        self._send(tokens)


class ReportingLimiter(RateLimiter):
    """Reports tokens, and leaves the counts and the headers of limits to the parent."""

    def __init__(self, key: ApiKey, reports: UsedTokenReports) -> None:
        super().__init__(key.limits)
        self._name = key.digest.hex()
        self._reports = reports

    def begin(self) -> None:
        """The parent has counted the request."""

    def end(self) -> None:
        """The parent counts its end."""

    def widen(self, answers: int, param: str) -> None:
        """Check the answers of one request. The parent counts them as one request."""
        super().widen(answers, param)
        super().narrow(answers)

    def narrow(self, answers: int) -> None:
        """`widen` has counted nothing."""

    def seconds_until_room(self) -> float:
        return 0.0

    def use_tokens(self, count: int) -> None:
        self._reports.use(self._name, count)

    def headers(self) -> dict[str, str]:
        return {}
