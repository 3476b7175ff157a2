"""Choose the replica for a request, and the number of replicas. Pure Python, without Ray."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import orjson

from engine.scheduling.block_pool import BlockHasher

BYTES_A_TOKEN = 4  # rough length of a token: a hashed piece of text is about one KV block long
MAX_BLOCKS = 1024  # most blocks of a prompt that are hashed
MAX_WAITING = 2.0  # a replica is added above this mean number of waiting requests per replica
ROOM = 0.5  # a replica is removed if the others would use less than this share of their rows
Replica = TypeVar("Replica")


class Policy(Protocol[Replica]):
    """Orders replicas by preference, and records which replica got a request."""

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """Return all replicas, the best first.

        `prefix` contains the hashes of the prompt's first blocks, `loads` the number of open
        requests of each replica.
        """

    def record(self, prefix: Sequence[bytes], replica: Replica) -> None: ...


class Random(Generic[Replica]):
    """Orders replicas at random, like a Kubernetes Service."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        return self._random.sample(list(loads), len(loads))

    def record(self, prefix: Sequence[bytes], replica: Replica) -> None:
        pass


class LeastLoaded(Random[Replica]):
    """Orders replicas by their open requests, fewest first. Ties are broken at random."""

    def rank(self, prefix: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        return sorted(super().rank(prefix, loads), key=lambda replica: loads[replica])


class PrefixAffinity(LeastLoaded[Replica]):
    """Prefers the least loaded of the replicas that got the longest known part of the prefix.

    If that replica has over `slack` open requests more than the least loaded one, the least loaded
    one comes first. A common system prompt is soon known to every replica, and then it ties no
    request to one of them. The turns of a conversation stay on one replica. Remembers the last
    `capacity` blocks.
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
    """Return hashes of the first blocks of a request's prompt.

    Each hash covers a block and all blocks before it, as in the prefix cache. Blocks contain token
    ids if the client sends them, otherwise bytes of the text or of the JSON of `messages`. Returns
    [] for an invalid body: the replica that gets the request reports the error.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(data, dict):
        return []
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # the first of several prompts decides
    if isinstance(prompt, list):
        return prefix_hashes(prompt, block_size)
    text = prompt.encode() if isinstance(prompt, str) else orjson.dumps(data.get("messages"))
    return prefix_hashes(text, block_size * BYTES_A_TOKEN)


def prefix_hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hash chain of the full blocks of `tokens`; [] if they are not token ids."""
    hashes: list[bytes] = []
    try:
        # No secret key: a client that makes two prompts collide only gets a poor route.
        BlockHasher(block_size, b"").extend(hashes, tokens[: block_size * MAX_BLOCKS], b"")
    except (TypeError, OverflowError):
        return []
    return hashes


def replicas_wanted(
    replicas: int, reporting: int, *, waiting: float, running: float, rows: float
) -> int:
    """Return `replicas`, or one more or one less.

    `waiting`, `running` and `rows` are sums over the `reporting` replicas. `rows` is the number of
    sequences that can run at once.
    """
    if not reporting:
        return replicas
    if waiting > MAX_WAITING * reporting:
        return replicas + 1
    rows_left = rows / reporting * (replicas - 1)
    return replicas - 1 if waiting + running < rows_left * ROOM else replicas
