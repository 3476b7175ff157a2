"""Stop strings: the result does not depend on how the text is cut, and no part of a stop leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.stop_strings import StopMatcher
from tests.support.thorough import examples

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)
PIECES = st.lists(st.text("ab\nc", max_size=5), max_size=12)


def reference(text: str, stops: list[str], early: int = 0) -> tuple[str, str | None]:
    """Find the first stop string by reading character by character.

    Of several that end together the longest wins. A stop string that ends within the first `early`
    characters does not count.
    """
    for end in range(early + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_back(text: str, stops: list[str]) -> str:
    """Return the longest suffix that is a proper prefix of a stop string."""
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
    return max((p for p in prefixes if text.endswith(p)), key=len)


@settings(max_examples=examples(1500))
@given(pieces=PIECES, stops=STOPS, include=st.booleans(), early=st.integers(0, 6))
def test_push_any_cuts_equals_reference(
    pieces: list[str], stops: list[str], include: bool, early: int
) -> None:
    matcher = StopMatcher(stops, include=include)
    emitted, seen = "", ""
    expected, expected_hit = reference("".join(pieces), stops, len("".join(pieces[:early])))
    for index, piece in enumerate(pieces):
        text, hit = matcher.push(piece, too_early=index < early)
        emitted, seen = emitted + text, seen + piece
        assert hit is None or hit == expected_hit
        if hit is not None:
            break
        assert seen == emitted + held_back(seen, stops)  # no more and no less than needed
    else:
        emitted += matcher.flush()
        assert expected_hit is None
    assert emitted == expected + (expected_hit or "" if include else "")


@pytest.mark.parametrize(
    ("stops", "pieces", "emitted", "hit"),
    [
        (["END"], ["E", "N", "E", "N", "D", "x"], "EN", "END"),
        (["abab"], ["ab", "aa", "ba", "b"], "aba", "abab"),
        (["bc", "abcd"], ["abcd"], "a", "bc"),
        (["c", "abc"], ["xab", "c"], "x", "abc"),
        (["\n\n", "###"], ["a\n", "#", "#\n\n"], "a\n##", "\n\n"),
        ([], ["ab"], "ab", None),
        (["🙂🙃"], ["🙂", "🙂", "🙃!"], "🙂", "🙂🙃"),
    ],
)
def test_push_example_finds_expected_stop(
    stops: list[str], pieces: list[str], emitted: str, hit: str | None
) -> None:
    matcher, text, found = StopMatcher(stops), "", None
    for piece in pieces:
        part, found = matcher.push(piece)
        text += part
        if found:
            break
    assert (text, found) == (emitted, hit)
    assert matcher.flush() == ""


def test_flush_without_match_returns_held_text() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a sto") == ("a ", None)
    assert matcher.flush() == "sto"
    assert matcher.flush() == ""


def test_push_long_stop_string_searches_only_held_and_new_text() -> None:
    """Each push searches only the held and the new text, not the whole text."""
    matcher = StopMatcher(["x" * 2000 + "y"])
    emitted = "".join(matcher.push("x")[0] for _ in range(20_000))
    assert len(emitted) == 18_000
    assert matcher.push("y") == ("", "x" * 2000 + "y")
