"""The golden checkpoints' texts, as the reference implementation wrote them, one at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy continuation, as the reference implementation computed them."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]

    def after(self, count: int, most: int = 10**6) -> Case:
        """The same text, `count` tokens of which are already in the prompt; `most` to come."""
        end = count + most
        return Case(
            self.prompt_ids + self.ids[:count], self.ids[count:end], self.logprobs[count:end]
        )


def cases_of(folder: Path) -> list[Case]:
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return [Case(case["prompt_ids"], case["ids"], case["logprobs"]) for case in cases]
