"""Routing and autoscaling policies that Ray Serve runs, tested without Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.ray.policies import (
    POLICIES,
    LeastLoaded,
    PrefixAffinity,
    Random,
    prefix_of,
    replicas_wanted,
)

IDLE = {"a": 0, "b": 0, "c": 0}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def hashes(text: str) -> list[bytes]:
    """Return the prefix hashes of a prompt in which each letter of `text` stands for a block."""
    return prefix_of(body(prompt="".join(letter * 64 for letter in text)), 16)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_rank_lists_every_replica_once(name: str) -> None:
    policy = POLICIES[name]()
    policy.record(hashes("xy"), "b")
    policy.record(hashes("xz"), "gone")
    assert sorted(policy.rank(hashes("xy"), IDLE)) == ["a", "b", "c"]
    assert policy.rank(hashes("xy"), {}) == []


def test_random_uses_all_replicas_and_least_loaded_the_idle_ones() -> None:
    assert {Random[str](seed).rank([], IDLE)[0] for seed in range(30)} == {"a", "b", "c"}
    loads = {"a": 2, "b": 1, "c": 1}
    firsts = [LeastLoaded[str](seed).rank([], loads) for seed in range(30)]
    assert {first[0] for first in firsts} == {"b", "c"}, "ties are broken at random"
    assert {first[2] for first in firsts} == {"a"}


def test_prefix_affinity_ranks_replica_with_longest_prefix_first() -> None:
    policy = PrefixAffinity[str](0)
    policy.record(hashes("sab"), "c")
    policy.record(hashes("sxy"), "a")
    assert policy.rank(hashes("sabde"), IDLE)[0] == "c"
    assert policy.rank(hashes("sxq"), IDLE)[0] == "a"


def test_prefix_affinity_replica_named_zero_is_chosen() -> None:
    policy = PrefixAffinity[int](0)
    policy.record(hashes("ab"), 0)
    assert {policy.rank(hashes("abc"), {0: 0, 1: 0, 2: 0})[0] for _ in range(20)} == {0}


def test_prefix_affinity_prefix_on_all_replicas_uses_least_loaded() -> None:
    policy = PrefixAffinity[str](0)
    for replica in IDLE:
        policy.record(hashes("s"), replica)
    assert policy.rank(hashes("snew"), {"a": 3, "b": 2, "c": 3})[0] == "b"


def test_prefix_affinity_overloaded_replica_loses_its_prefixes() -> None:
    policy = PrefixAffinity[str](0, slack=4)
    policy.record(hashes("sab"), "c")
    assert policy.rank(hashes("sab"), {"a": 0, "b": 1, "c": 4})[0] == "c"
    assert policy.rank(hashes("sab"), {"a": 0, "b": 1, "c": 5})[0] == "a"


def test_prefix_affinity_removed_replica_falls_back_to_shorter_prefix() -> None:
    policy = PrefixAffinity[str](0)
    policy.record(hashes("sab"), "gone")
    policy.record(hashes("sa"), "b")
    assert policy.rank(hashes("sab"), IDLE)[0] == "b"


def test_prefix_affinity_over_capacity_forgets_oldest_prefix() -> None:
    policy = PrefixAffinity[str](0, capacity=3)
    policy.record(hashes("abc"), "a")
    policy.record(hashes("xyz"), "b")
    assert {policy.rank(hashes("abc"), IDLE)[0] for _ in range(50)} == {*IDLE}
    assert policy.rank(hashes("xyz"), IDLE)[0] == "b"


def test_prefix_of_prompts_with_common_prefix_share_first_hashes() -> None:
    system = {"role": "system", "content": "s" * 300}
    one, two = (
        prefix_of(body(messages=[system, {"role": "user", "content": text * 100}]), 16)
        for text in ("what ", "when ")
    )
    shared = [a == b for a, b in zip(one, two, strict=True)]
    assert shared[:4] == [True] * 4
    assert not any(shared[6:])
    assert len(one) > 8


def test_prefix_of_token_ids_hashes_cache_blocks() -> None:
    ids = list(range(100))
    assert len(prefix_of(body(prompt=ids), 16)) == 6
    assert prefix_of(body(prompt=ids), 16) == prefix_of(body(prompt=[ids, [1]]), 16)
    assert prefix_of(body(prompt=[5, *ids]), 16) != prefix_of(body(prompt=ids), 16)
    # A hash depends on all earlier blocks, too.
    assert len({*prefix_of(body(prompt=[7] * 64), 16)}) == 4


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b"null", body(), body(prompt=None), body(prompt=[]), body(prompt=[[]])]
    + [body(prompt=ids * 40) for ids in ([2**40], [1.5], [None], [True, "x"], [{}])]
    + [body(prompt=5), body(prompt={"a": 1}), body(messages="x")],
)
def test_prefix_of_invalid_prompt_is_empty(raw: bytes) -> None:
    assert prefix_of(raw, 16) == []


@pytest.mark.parametrize(
    ("replicas", "waiting", "running", "expected"),
    [
        (2, 5, 200, 3),  # more than two waiting requests per replica
        (2, 4, 200, 2),
        (2, 0, 60, 1),  # one replica could run the load with less than half its rows
        (2, 0, 64, 2),
        (1, 0, 0, 1),
        (3, 0, 0, 2),
    ],
)
def test_replicas_wanted_follows_the_queue(
    replicas: int, waiting: float, running: float, expected: int
) -> None:
    rows = 128 * replicas
    found = replicas_wanted(replicas, replicas, waiting=waiting, running=running, rows=rows)
    assert found == expected


def test_replicas_wanted_without_reports_is_unchanged() -> None:
    assert replicas_wanted(2, 0, waiting=0, running=0, rows=0) == 2
