"""Which replica a request goes to, and how many there should be. Pure Python, without Ray."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import orjson

from engine.scheduling.block_pool import BlockHasher

BYTES_A_TOKEN = 4  # of text, roughly: a block of text is as long as a block of the KV cache
MAX_BLOCKS = 1024  # of a prompt that are hashed
MAX_WAITING = 2.0  # requests in the queue of a replica, on average, beyond which there is one more
ROOM = 0.5  # share of their rows that the replicas left over may use, for one to be given up
Replica = TypeVar("Replica")


class Policy(Protocol[Replica]):
    """Orders replicas by preference, and is told which of them took the request."""

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """All replicas, the best first. `prefix` are the hashes of the prompt's first blocks,
        `loads` the open requests of every replica."""

    def record(self, prefix: Sequence[bytes], replica: Replica) -> None: ...


class Random(Generic[Replica]):
    """Any replica; what a Service of Kubernetes does."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        return self._random.sample(list(loads), len(loads))

    def record(self, prefix: Sequence[bytes], replica: Replica) -> None:
        pass


class LeastLoaded(Random[Replica]):
    """The replica with the fewest open requests, any of them where several have as few."""

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        return sorted(super().rank(prefix, loads), key=lambda replica: loads[replica])


class PrefixAffinity(LeastLoaded[Replica]):
    """Of the replicas that were sent the longest known part of the prefix, the least loaded; where
    that one has over `slack` requests more than the least loaded of all, this other one.

    A system prompt that everyone shares is soon known to every replica and binds nobody; the turns
    of one conversation stay together. Remembers the last `capacity` blocks.
    """

    def __init__(self, seed: int | None = None, *, capacity: int = 200_000, slack: int = 8) -> None:
        super().__init__(seed)
        self._capacity = capacity
        self._slack = slack
        self._holders: OrderedDict[bytes, set[Replica]] = OrderedDict()

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        ranked = super().rank(prefix, loads)
        for digest in reversed(prefix):
            holders = self._holders.get(digest, set())
            if found := [replica for replica in ranked if replica in holders]:
                best = found[0]
                if loads[best] <= loads[ranked[0]] + self._slack:
                    ranked.remove(best)
                    ranked.insert(0, best)
                break
        return ranked

    def record(self, prefix: Sequence[bytes], replica: Replica) -> None:
        for digest in prefix:
            self._holders.setdefault(digest, set()).add(replica)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)


POLICIES: dict[str, Callable[[], Policy[Any]]] = {
    "random": Random,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAffinity,
}


def prefix_of(body: bytes, block_size: int) -> list[bytes]:
    """Hashes of the first blocks of a request's prompt, each of a block and all before it, as the
    KV cache names them; of token ids where the client sends them, else of the text's bytes.

    Empty for what is no prompt: the server that gets the request will say what is wrong with it.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(data, dict):
        return []
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # of several, the first decides
    if isinstance(prompt, list):
        return prefix_hashes(prompt, block_size)
    text = prompt.encode() if isinstance(prompt, str) else orjson.dumps(data.get("messages"))
    return prefix_hashes(text, block_size * BYTES_A_TOKEN)


def prefix_hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The chain over the full blocks of `tokens`; empty where they are no token ids."""
    hashes: list[bytes] = []
    try:
        # Without a key: who makes two prompts collide gains a replica that knows neither.
        BlockHasher(block_size, b"").extend(hashes, tokens[: block_size * MAX_BLOCKS], b"")
    except (TypeError, OverflowError):
        return []
    return hashes


def replicas_wanted(
    replicas: int, reporting: int, *, waiting: float, running: float, rows: float
) -> int:
    """One more, one less or as many as `replicas`; the sums are over those that are `reporting`,
    `rows` being the sequences that can run at once."""
    if not reporting:
        return replicas
    if waiting > MAX_WAITING * reporting:
        return replicas + 1
    rows_left = rows / reporting * (replicas - 1)
    return replicas - 1 if waiting + running < rows_left * ROOM else replicas
