"""Expected outputs of the golden checkpoints, from the reference implementation (batch 1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy continuation from the reference implementation."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    prompt: str = ""

    def after(self, count: int, most: int = 10**6) -> Case:
        """Move the first `count` output tokens to the prompt; expect at most `most` after them."""
        end = count + most
        return Case(
            self.prompt_ids + self.ids[:count], self.ids[count:end], self.logprobs[count:end]
        )


def cases_of(folder: Path) -> list[Case]:
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return [
        Case(case["prompt_ids"], case["ids"], case["logprobs"], case["prompt"]) for case in cases
    ]
