"""The shared part of the runners of Ollama's clients: the servers to call, and the report of cells.

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

EQUAL = 1e-6  # of numbers that are printed with all their digits
MODEL, SEER, ENCODER = "demo", "seer", "minilm"
TOO_HOT = 3.0  # a temperature above the limit of 2
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 100}


@dataclass(frozen=True)
class Target:
    """The servers of a run, and what they answer over plain HTTP.

    `seen` is what the model at `seeing_url` answers about `picture`, in base64, and `question`, and
    `seen_below_break` what it answers with a line break before the question.
    `vector` is that of `text`, of length 1, from the encoder at `encoder_url`.
    """

    url: str
    seeing_url: str
    encoder_url: str
    picture: str
    question: str
    seen: str
    seen_below_break: str
    seen_tokens: int  # of the answer
    text: str
    vector: list[float]
    browser: str = ""  # the path of Chromium


def target() -> Target:
    return Target(**json.loads(sys.argv[1]))


TARGET = target()


def check_vector(found: Sequence[float]) -> None:
    numbers = [float(number) for number in found]
    assert len(numbers) == len(TARGET.vector), f"{len(numbers)} numbers"
    worst = max(abs(one - other) for one, other in zip(numbers, TARGET.vector, strict=True))
    assert worst < EQUAL, f"differs by {worst}"


def run(client: str, **cells: Callable[[], Any]) -> None:
    """Run the functions of a client. Their names are those of cells, with _ for a space."""
    for name, cell in cells.items():
        reason = ""
        try:
            cell()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        line = {
            "client": client,
            "cell": name.replace("_", " "),
            "passed": not reason,
            "reason": reason,
        }
        print(json.dumps(line), flush=True)
