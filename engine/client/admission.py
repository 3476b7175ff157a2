"""Admission control: counts the requests waiting for the engine and refuses those without room.

The queue is limited by requests, by prompt tokens and by waiting time. Past saturation, a queue
limited by length alone stays full. Every request then waits for the whole queue, and all answers
come too late although the engine is fully used. Refusing requests that would wait too long keeps
the others in time.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from engine.client.shares import Shares
from engine.config import EngineConfig
from engine.errors import EngineOverloadedError, RequestRejectedError
from engine.protocol.outputs import EngineStats

# Of the images of waiting requests. The engine holds them until they are encoded.
MAX_PIXEL_BYTES = 1 << 30
AT_ONCE = 16  # one request with several prompts may have 16 times --max-num-queued-tokens
DEFAULT_WAIT_S = 0.5  # longest expected wait without --max-queue-wait
# Requests that may wait without --max-queue-wait, for as long as it takes. A slow model computes
# one prompt for seconds, and a few clients that wait for it are no overload.
ALWAYS_QUEUED = 8
MEMORY = 32  # number of admissions after which the weight of an earlier interval is about a third


class ServiceRate:
    """Average of the seconds between admissions while the engine, not the arrivals, limits them.

    All times come from the same clock.
    """

    def __init__(self) -> None:
        self._interval = 0.0
        # Time of the last admission, or of the first request in an empty queue. None: empty.
        self._since: float | None = None

    def joined(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def admitted(self, count: int, now: float, *, left: bool) -> None:
        """Record that `count` requests left the queue in one step; `left`: others still wait."""
        if self._since is not None and count:
            interval = (now - self._since) / count
            # An empty queue means that the engine could have taken more. So the interval is only
            # an upper bound.
            if left or interval < self._interval:
                kept = (1 - 1 / MEMORY) ** count
                self._interval = self._interval * kept + interval * (1 - kept)
        self._since = now if left else None

    def emptied(self) -> None:
        """Record that all waiting requests left without being admitted."""
        self._since = None

    def wait(self, ahead: int, now: float) -> float:
        """Return the least seconds until a request behind `ahead` others would be admitted."""
        if self._since is None:
            return 0.0
        return max(self._interval * (ahead + 1), now - self._since)


class QueuedRequest(NamedTuple):
    """The tenant of a waiting request, and the room that it takes."""

    tenant: str
    requests: int
    tokens: int  # of its prompts
    pixels: int  # bytes of its images


class AdmissionControl:
    """The waiting requests and their tokens, within the limits of a configuration.

    `clock` must be the clock of the times passed to the methods; a simulation has its own.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._waiting: dict[int, QueuedRequest] = {}  # by id
        self._requests = Shares(config.max_num_queued_reqs)  # with reservations, see `reserve`
        self._tokens = Shares(config.max_num_queued_tokens)  # of prompts
        self._pixels = Shares(MAX_PIXEL_BYTES)
        self._expected = 0  # reservations
        self._service_rate = ServiceRate()

    @contextlib.contextmanager
    def reserve(self, stats: EngineStats, tenant: str = "") -> Iterator[None]:
        """Reserve the place of a request while it is prepared.

        This way no more requests are tokenised at a time than the queue has room for. Raises like
        `check`, before the reservation.
        """
        self.check(1, 0, stats, tenant)
        self._expected += 1
        self._requests.take(tenant)
        try:
            yield
        finally:
            self._expected -= 1
            self._requests.give_back(tenant)

    @property
    def requests(self) -> int:
        """The number of requests sent to the engine and not yet known to be admitted."""
        return self._requests.total - self._expected

    def check(
        self, requests: int, tokens: int, stats: EngineStats, tenant: str = "", pixels: int = 0
    ) -> None:
        """Raise EngineOverloadedError if the queue has no room for `requests` with `tokens`.

        An empty queue takes any request that the model can hold, regardless of the limits. No
        tenant may fill it: see Shares. `pixels` are the bytes of images. Raises
        RequestRejectedError if a request with several prompts has too much even for that.
        """
        limits = self._config
        if requests > 1 and tokens > (most := AT_ONCE * limits.max_num_queued_tokens):
            raise RequestRejectedError(
                "invalid_value",
                f"The prompts of this request have {tokens} tokens in all, each counted n times; "
                f"the limit is {most}. Send them in several requests.",
            )
        if pixels:
            self._check_pixels(requests, pixels, tenant)
        queued, waiting = self._requests.total, self._tokens.total
        is_full = queued and not self._requests.may_take(tenant, requests)
        if is_full or (self._waiting and not self._tokens.may_take(tenant, tokens)):
            # Estimated from the waiting tokens and the throughput of the last step.
            per_step = max(stats.step_prefill_tokens + stats.step_decode_tokens, 1)
            share = ""
            if self._requests.has_room(requests) and self._tokens.has_room(tokens):
                mine, mine_tokens = self._requests.held(tenant), self._tokens.held(tenant)
                share = (
                    f" {mine} of them with {mine_tokens} tokens have your API key, and the rest of "
                    "the queue is left to other keys."
                )
            raise EngineOverloadedError(
                f"The queue is full: {queued} requests with {waiting} "
                f"prompt tokens wait; the limits are {limits.max_num_queued_reqs} requests "
                f"(--max-num-queued-reqs) and {limits.max_num_queued_tokens} tokens "
                f"(--max-num-queued-tokens).{share}",
                retry_after=_retry_after(waiting / per_step * stats.step_seconds),
            )
        self._check_wait(self._ahead(tenant))

    def _check_pixels(self, requests: int, pixels: int, tenant: str) -> None:
        """Raise as `check` does if the images of waiting requests would take too much memory."""
        most = MAX_PIXEL_BYTES >> 20
        if requests > 1 and pixels > MAX_PIXEL_BYTES:
            raise RequestRejectedError(
                "invalid_value",
                f"The pixels of the images of this request have {pixels >> 20} MiB in all, each "
                f"counted n times; the limit is {most} MiB. Send it several times with a lower n.",
            )
        if self._pixels.total and not self._pixels.may_take(tenant, pixels):
            raise EngineOverloadedError(
                f"The queue is full: the images of waiting requests have {self._pixels.total >> 20}"
                f" MiB of pixels; the limit is {most} MiB.",
                retry_after=_retry_after(1.0),
            )

    def _check_wait(self, ahead: int) -> None:
        """Raise EngineOverloadedError if a request behind `ahead` others would wait too long."""
        most = self._config.max_queue_wait
        if most is None:
            if ahead < ALWAYS_QUEUED:
                return
            most = DEFAULT_WAIT_S
        wait = self._service_rate.wait(ahead, self._clock())
        if wait > most:
            raise EngineOverloadedError(
                f"The queue is full: {ahead} requests wait, and a new one would wait for about "
                f"{wait:.1f} s; the limit is {most:g} s (--max-queue-wait).",
                retry_after=_retry_after(wait),
            )

    def _ahead(self, tenant: str) -> int:
        """Return about how many requests are served before a new one of the tenant.

        The tenants take turns, so those with more waiting requests do not delay it further.
        """
        mine = self._requests.held(tenant)
        return sum(min(held, mine + (owner != tenant)) for owner, held in self._requests)

    def join(
        self, request_id: int, requests: int, tokens: int, tenant: str = "", pixels: int = 0
    ) -> None:
        self._waiting[request_id] = QueuedRequest(tenant, requests, tokens, pixels)
        self._requests.take(tenant, requests)
        self._tokens.take(tenant, tokens)
        self._pixels.take(tenant, pixels)
        self._service_rate.joined(self._clock())

    def _remove(self, ids: Iterable[int]) -> int:
        """Remove requests, and return how many they count as. Unknown ids are ignored."""
        left = 0
        for request_id in ids:
            queued = self._waiting.pop(request_id, None)
            if queued is not None:
                self._requests.give_back(queued.tenant, queued.requests)
                self._tokens.give_back(queued.tenant, queued.tokens)
                self._pixels.give_back(queued.tenant, queued.pixels)
                left += queued.requests
        return left

    def admitted(self, ids: Iterable[int], at: float) -> None:
        """Remove requests that the engine admitted at time `at`. Other ids are ignored."""
        waited = len(self._waiting)
        left = self._remove(ids)
        if len(self._waiting) < waited:
            self._service_rate.admitted(left, at, left=bool(self._waiting))

    def forget(self, ids: Iterable[int]) -> None:
        self._remove(ids)
        if not self._waiting:
            self._service_rate.emptied()

    def clear(self) -> None:
        self.forget(list(self._waiting))


def _retry_after(seconds: float) -> int:
    """Return the Retry-After value: whole seconds, at most 60.

    It adds up to a quarter at random, so that clients refused together do not retry together.
    """
    return math.ceil(min(max(seconds, 1.0), 48.0) * random.uniform(1.0, 1.25))
