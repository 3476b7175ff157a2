"""The shared part of the runners of encoders: what to compare, and the report of cells.

A runner is a script in the environment of its client. Its argument is the JSON of Target. It
prints one line of JSON per cell: {"client", "cell", "passed", "reason"}. A client that has no such
cell prints none.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cells import raised

EQUAL = 1e-6  # of numbers that are printed with all their digits
MODEL, RERANKER = "minilm", "reranker"


@dataclass(frozen=True)
class Target:
    """The servers of a run, and what they answer over plain HTTP.

    `url` serves vectors and `rerank_url` scores, both with `key`. `vectors` are of `texts`, and
    `short` is the first one with 8 numbers. `ranking` has the index and the score of each of
    `texts` for `query`, the best first. `long` has more tokens than the encoder accepts.
    `tiktoken` is a folder with the vocabulary cl100k.
    """

    url: str
    rerank_url: str
    key: str
    texts: list[str]
    vectors: list[list[float]]
    short: list[float]
    query: str
    ranking: list[tuple[int, float]]
    long: str
    tiktoken: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def vector(self, text: str) -> list[float]:
        return self.vectors[self.texts.index(text)]


def target() -> Target:
    return Target(**json.loads(sys.argv[1]))


TARGET = target()
TEXTS = TARGET.texts


def check_vector(found: Sequence[float], expected: Sequence[float]) -> None:
    numbers = [float(number) for number in found]
    assert len(numbers) == len(expected), f"{len(numbers)} numbers, not {len(expected)}"
    worst = max(abs(one - other) for one, other in zip(numbers, expected, strict=True))
    assert worst < EQUAL, f"differs by {worst}"


def check_vectors(found: Sequence[Sequence[float]]) -> None:
    """Check the vectors of all texts, in their order."""
    assert len(found) == len(TEXTS), f"{len(found)} vectors"
    for one, other in zip(found, TARGET.vectors, strict=True):
        check_vector(one, other)


def check_ranking(found: Sequence[tuple[int, float]], count: int | None = None) -> None:
    """Check the first `count` results, each an index and a score; None: all."""
    expected = TARGET.ranking[:count]
    assert [index for index, _ in found] == [index for index, _ in expected], found
    for (_, score), (_, due) in zip(found, expected, strict=True):
        assert abs(float(score) - due) < EQUAL, (score, due)


def check_ranked_texts(found: Sequence[tuple[str, float]]) -> None:
    check_ranking([(TEXTS.index(text), score) for text, score in found])


def check_raises(call: Callable[[], Any], *parts: str) -> None:
    """Check that `call` raises an error whose text, or that of its cause, has all parts."""
    error: BaseException | None = raised(call)
    chain: list[str] = []
    while error is not None:
        chain.append(f"{error!r} {error}")
        error = error.__cause__ or error.__context__
    text = "\n".join(chain)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in {text}"


def check_refused_key(call: Callable[[], Any]) -> None:
    check_raises(call, "401")


def check_too_long(call: Callable[[], Any]) -> None:
    """Check that the error names the limit and the number of tokens."""
    check_raises(call, "maximum context length is 96 tokens", "this text has ")


def run(client: str, **cells: Callable[[], Any]) -> None:
    """Run the functions of a client. Their names are those of cells, with _ for a space."""
    for name, cell in cells.items():
        passed, reason = True, ""
        try:
            cell()
        except Exception as error:
            passed, reason = False, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        line = {
            "client": client,
            "cell": name.replace("_", " "),
            "passed": passed,
            "reason": reason,
        }
        print(json.dumps(line), flush=True)
