"""Limits of one API key: requests and tokens per minute, and requests at the same time.

They are counted in the memory of this process, in token buckets. The headers are those of OpenAI's
API: https://platform.openai.com/docs/guides/rate-limits
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from server.http.errors import ApiError, invalid
from server.http.key_limits import KeyLimits

# Only keys with such a limit have them.
RATE_LIMIT_HEADERS = (
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)
MOST_RETRY_S = 119  # in Retry-After: agents give up on a longer one
BUSY_S = 0.2  # between two looks for the end of a request
Clock = Callable[[], float]  # seconds


class TokenBucket:
    """A bucket that holds `per_minute` units when it is full, and fills in one minute.

    The length of an answer is known only at its end, so the level may fall below zero.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.size = per_minute
        self._per_second = per_minute / 60
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        grown = self._level + (now - self._filled_at) * self._per_second
        self._level = min(grown, float(self.size))
        self._filled_at = now
        return self._level

    def take(self, units: int) -> None:
        self._level = self.level - units

    def seconds_until(self, level: float) -> float:
        """Return when the bucket will have reached `level`; 0 if it has."""
        return max(level - self.level, 0.0) / self._per_second


class RateLimiter:
    """Counts what the requests of one key use, and refuses those beyond its limits."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self._running = 0
        self._buckets: dict[str, TokenBucket] = {}
        if limits.requests_per_minute is not None:
            self._buckets["requests"] = TokenBucket(limits.requests_per_minute, clock)
        if limits.tokens_per_minute is not None:
            self._buckets["tokens"] = TokenBucket(limits.tokens_per_minute, clock)

    def begin(self) -> None:
        """Count a request. Raises a 429 ApiError, and counts nothing, if a limit is reached."""
        if not self._has_room(1):
            raise _refusal(f"{self.limits.concurrent_requests} concurrent requests", 1.0)
        for noun, bucket in self._buckets.items():
            wait = bucket.seconds_until(1.0)
            if wait > 0:
                raise _refusal(f"{bucket.size} {noun} per minute", wait)
        self._running += 1
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    def end(self) -> None:
        """Count the end of a request that `begin` has counted."""
        self._running -= 1

    def seconds_until_room(self) -> float:
        """Return how long a request should wait before `begin` may count it; 0 if it may now."""
        waits = [bucket.seconds_until(1.0) for bucket in self._buckets.values()]
        if not self._has_room(1):
            waits.append(BUSY_S)
        return max(waits, default=0.0)

    def widen(self, answers: int, param: str) -> None:
        """Count a request that `begin` has counted as `answers` concurrent ones; see `narrow`.

        Raises ApiError if the limit is reached: a 400, which names `param`, if the request alone
        exceeds it, else a 429.
        """
        most = self.limits.concurrent_requests
        if most is not None and answers > most:
            message = (
                f"The request counts as {answers} concurrent requests, one for each answer; this "
                f"key may have {most}. Send them in several requests."
            )
            raise invalid(param, message)
        if not self._has_room(answers - 1):
            raise _refusal(f"{most} concurrent requests, and this one counts as {answers}", 1.0)
        self._running += answers - 1

    def narrow(self, answers: int) -> None:
        """Undo `widen`."""
        self._running -= answers - 1

    def _has_room(self, count: int) -> bool:
        most = self.limits.concurrent_requests
        return most is None or self._running + count <= most

    def use_tokens(self, count: int) -> None:
        """Count tokens of a prompt or an answer."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(count)

    def headers(self) -> dict[str, str]:
        """Return the headers that say what is left. `reset` is the time until a bucket is full."""
        found = {}
        for noun, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{noun}"] = str(bucket.size)
            found[f"x-ratelimit-remaining-{noun}"] = str(max(math.floor(bucket.level), 0))
            reset = bucket.seconds_until(bucket.size)
            found[f"x-ratelimit-reset-{noun}"] = duration(reset)
        return found


def _refusal(limit: str, wait: float) -> ApiError:
    seconds = max(math.ceil(wait), 1)
    message = f"This key has reached its limit of {limit}. Retry in {seconds} s."
    headers = {"retry-after": str(min(seconds, MOST_RETRY_S))}
    return ApiError(429, "rate_limit_exceeded", message, headers=headers)


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 120ms, 1s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes:
        return f"{minutes}m{rest}s"
    return f"{rest}s"
