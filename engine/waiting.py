"""WaitingQueue: who has been sent to the engine and does not run yet, and whether there is room.

Bounded by requests, by prompt tokens, and by time. Past saturation a queue that is bounded by its
length alone fills, everybody waits as long as all of it takes, and every answer comes too late
although the engine works as hard as it can. Refusing at once whoever would wait too long keeps the
others in time.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator

from engine.config import EngineConfig
from engine.errors import EngineOverloadedError, RequestRejectedError
from engine.protocol import EngineStats

AT_ONCE = 16  # times --max-num-queued-tokens: what one request may bring, of many prompts
MEMORY = 32  # admissions after which an earlier pace counts for a third


class Pace:
    """Seconds between admissions where the engine, and not the arrivals, sets the pace; times are
    those of one clock."""

    def __init__(self) -> None:
        self._interval = 0.0
        self._since: float | None = None  # of the last admission, or of the queue's beginning

    def joined(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def admitted(self, count: int, now: float, *, left: bool) -> None:
        """`count` requests left the queue in one step; `left`: others still wait."""
        if self._since is not None and count:
            interval = (now - self._since) / count
            # Where nobody is left, the engine would have taken more: it is at least so quick.
            if left or interval < self._interval:
                kept = (1 - 1 / MEMORY) ** count
                self._interval = self._interval * kept + interval * (1 - kept)
        self._since = now if left else None

    def emptied(self) -> None:
        """Those who waited have gone elsewhere."""
        self._since = None

    def wait(self, ahead: int, now: float) -> float:
        """Seconds until a request behind `ahead` others would be admitted, at least."""
        if self._since is None:
            return 0.0
        return max(self._interval * (ahead + 1), now - self._since)


class WaitingQueue:
    """Request ids, each with what it counts for, in the bounds of a configuration. `clock` is that
    of the times it is told; a simulation has its own."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._waiting: dict[int, tuple[int, int]] = {}  # id -> (requests, prompt tokens)
        self._expected = 0  # requests on their way here
        self._pace = Pace()

    @contextlib.contextmanager
    def expecting(self, stats: EngineStats) -> Iterator[None]:
        """Holds the place of a request that is being made ready: of a crowd, only as many shall be
        tokenised as there is room for. Raises as `check`, before anything is done."""
        self.check(1, 0, stats)
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    @property
    def requests(self) -> int:
        """How many have been sent and wait, as far as is known."""
        return sum(count for count, _ in self._waiting.values())

    def check(self, requests: int, tokens: int, stats: EngineStats) -> None:
        """Raises EngineOverloadedError where these have no room. An empty queue takes any request
        the model can hold, whatever the bounds; RequestRejectedError where so many tokens at once
        would be a danger even to an empty one."""
        limits = self._config
        if requests > 1 and tokens > (most := AT_ONCE * limits.max_num_queued_tokens):
            raise RequestRejectedError(
                "invalid_value",
                f"The prompts of one request may have {most} tokens in all, each counted n times, "
                f"not {tokens}: send them in several.",
            )
        queued = self._expected + self.requests
        waiting = sum(size for _, size in self._waiting.values())
        if (queued and queued + requests > limits.max_num_queued_reqs) or (
            self._waiting and waiting + tokens > limits.max_num_queued_tokens
        ):
            # Its tokens at the last step's pace.
            per_step = max(stats.step_prefill_tokens + stats.step_decode_tokens, 1)
            raise EngineOverloadedError(
                f"The queue is full: {queued} requests with {waiting} "
                f"prompt tokens wait; the bounds are {limits.max_num_queued_reqs} requests "
                f"(--max-num-queued-reqs) and {limits.max_num_queued_tokens} tokens "
                "(--max-num-queued-tokens).",
                retry_after=_retry_after(waiting / per_step * stats.step_seconds),
            )
        wait = self._pace.wait(queued, self._clock())
        if limits.max_queue_wait is not None and wait > limits.max_queue_wait:
            raise EngineOverloadedError(
                f"The queue is full: {queued} requests wait, and one more would wait for about "
                f"{wait:.1f} s; the bound is {limits.max_queue_wait:g} s (--max-queue-wait).",
                retry_after=_retry_after(wait),
            )

    def join(self, request_id: int, requests: int, tokens: int) -> None:
        self._waiting[request_id] = requests, tokens
        self._pace.joined(self._clock())

    def admitted(self, ids: Iterable[int], at: float) -> None:
        """They run as of the clock's `at`; ids that do not wait are passed over."""
        left = [self._waiting.pop(i)[0] for i in ids if i in self._waiting]
        if left:
            self._pace.admitted(sum(left), at, left=bool(self._waiting))

    def forget(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._waiting.pop(request_id, None)
        if not self._waiting:
            self._pace.emptied()

    def clear(self) -> None:
        self._waiting.clear()
        self._pace.emptied()


def _retry_after(seconds: float) -> int:
    """What a client is told: whole seconds, a minute at most; up to a quarter more than need be, so
    that those refused together do not come back together."""
    return math.ceil(min(max(seconds, 1.0), 48.0) * random.uniform(1.0, 1.25))
