"""The shared part of the runners that send images: the pictures, and the report of cells.

A runner is a script in the environment of its client. Its argument is the JSON of Target. It
prints one line of JSON per cell: {"client", "cell", "passed", "reason"}. A client that has no such
cell prints none.
"""

from __future__ import annotations

import base64
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cells import raised

MODEL = "seer"
TOKENS = 12  # of an answer
TOOL = "look"


@dataclass(frozen=True)
class Target:
    """The server, and what it answers over plain HTTP. It generates the likeliest tokens.

    `pictures` are two PNGs in base64. `one` is the answer to `question` with the first, `several`
    with both, and `tokens` is the number of tokens of a prompt for each of the two.
    """

    url: str
    question: str
    pictures: list[str]
    one: str
    several: str
    tokens: list[int]
    browser: str = ""  # the path of Chromium; only for Open WebUI

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def urls(self) -> list[str]:
        return [f"data:image/png;base64,{picture}" for picture in self.pictures]

    @property
    def bytes(self) -> list[bytes]:
        return [base64.b64decode(picture) for picture in self.pictures]


TARGET = Target(**json.loads(sys.argv[1]))
NO_IMAGE = base64.b64encode(b"%PDF-1.7 no picture").decode()
REASON = "The image is a PDF"


def check_one(text: str | None) -> None:
    assert text == TARGET.one, f"{text!r} is not {TARGET.one!r}"


def check_several(text: str | None) -> None:
    assert text == TARGET.several, f"{text!r} is not {TARGET.several!r}"


def check_stream(pieces: Iterable[str]) -> None:
    """Check all pieces. There may be one only, because the model is fast."""
    check_one("".join(pieces))


def check_more(with_image: int | None, without: int | None) -> None:
    """Check the lengths of two prompts; the first has an image more."""
    image = TARGET.tokens[1] - TARGET.tokens[0]
    lengths = with_image or 0, without or 0
    assert lengths[0] - lengths[1] > image // 2, lengths


def check_refused(call: Callable[[], Any]) -> None:
    """Check that a file which is no image is a 400 whose message says so."""
    error = raised(call)
    assert REASON in str(error), error
    statuses = [getattr(each, "status_code", None) for each in (error, error.__cause__)]
    assert 400 in statuses, (statuses, error)


def run(client: str, **cells: Callable[[], Any]) -> None:
    """Run the cells of a client, whose names have underscores for spaces, and print the results."""
    for name, cell in cells.items():
        reason = ""
        try:
            cell()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        line = {"client": client, "cell": name.replace("_", " "), "passed": not reason}
        print(json.dumps({**line, "reason": reason}), flush=True)
