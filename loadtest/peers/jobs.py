"""The workloads of `make bench-peers`, and prompts that are equal as token ids and as text."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from loadtest.workload import poisson

SPACED_WORD = re.compile("Ġ[a-z]{2,}")  # Ġ is a space in a byte-level vocabulary
LETTER = re.compile("[A-Za-z]")
ENOUGH_WORDS = 100


class Closed(NamedTuple):
    """A closed loop: each stream sends its requests one after the other."""

    streams: int
    prompt: int  # tokens
    new: int  # tokens
    each: int  # requests of each stream
    shared: int = 0  # tokens at the start of all prompts that are equal


SATURATING = "32 streams"
CLOSED = {
    "1 stream": Closed(1, 128, 64, 4),
    "8 streams": Closed(8, 128, 64, 2),
    SATURATING: Closed(32, 128, 64, 2),
    "8 streams, 1700 in": Closed(8, 1700, 128, 1),
    "1050 in": Closed(1, 1050, 16, 5),
    "1050 in, 1000 shared": Closed(1, 1050, 16, 5, 1000),
}
# A model of 1.1 billion weights takes ten times as long.
LARGE = {"1 stream": Closed(1, 128, 32, 2), "8 streams": Closed(8, 128, 32, 2)}
ARRIVING = "arriving"  # requests arrive at random, at SHARE of vLLM's rate with 32 streams
SHARE, ARRIVING_S = 0.7, 30.0
WARM_NEW = 8  # tokens of a warm-up's answers
JOB_S = 240.0  # a contender that takes longer for a job or its warm-up has no figure


class Room(NamedTuple):
    """The most streams at once, and the tokens of the longest request, that a server must take."""

    streams: int
    context: int


@dataclass(frozen=True)
class Job:
    """Requests that `streams` clients send one after the other, or that arrive at `arrivals`."""

    prompts: list[list[int]]
    new: int
    streams: int
    arrivals: tuple[float, ...] = ()  # seconds; empty for a closed loop

    @property
    def warm_up(self) -> Job:
        """A request for each stream. None begins like a measured prompt, for prefix caches."""
        prompts = [prompt[::-1] for prompt in self.prompts[: self.streams]]
        return Job(prompts, WARM_NEW, self.streams)


class Words:
    """Draws prompts of tokens that keep their ids if they are decoded and encoded again.

    So contenders that take only text get the same ids as the others. The tokens are words with a
    space before them, or single letters if the vocabulary has few words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = self._plain(SPACED_WORD)
        if len(self._ids) < ENOUGH_WORDS:
            self._ids = self._plain(LETTER)

    def _plain(self, form: re.Pattern[str]) -> list[int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        ids = sorted(number for token, number in vocabulary.items() if form.fullmatch(token))
        return [
            number for number in ids if self._encode(self._tokenizer.decode([number])) == [number]
        ]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompts(self, count: int, length: int, seed: str) -> list[list[int]]:
        rng = random.Random(seed)
        return [rng.choices(self._ids, k=length) for _ in range(count)]

    def text(self, prompt: list[int]) -> str:
        """Return the text of a prompt. Raises ValueError if its token ids would differ."""
        text: str = self._tokenizer.decode(prompt)
        if self._encode(text) != prompt:
            raise ValueError("a prompt has other token ids after it was decoded and encoded")
        return text


def closed_job(workload: Closed, words: Words, seed: str) -> Job:
    """Return the requests of a round. Jobs of the same server need different seeds.

    Otherwise, prompts of one would begin like those of another, and be found in its cache.
    """
    streams, prompt, new, each, shared = workload
    [common] = words.prompts(1, shared, f"shared {seed}")
    own = words.prompts(streams * each, prompt - shared, f"own {seed}")
    return Job([common + rest for rest in own], new, streams)


def arriving_job(workload: Closed, words: Words, seed: str, rate: float) -> Job:
    """Return requests of the lengths of `workload` that arrive at `rate` requests/s (Poisson)."""
    at, arrivals, gaps = 0.0, list[float](), poisson(random.Random(seed))
    while (at := at + next(gaps) / rate) < ARRIVING_S:
        arrivals.append(at)
    prompts = words.prompts(len(arrivals), workload.prompt, f"own {seed}")
    return Job(prompts, workload.new, workload.streams, tuple(arrivals))


def workloads(model: str) -> Mapping[str, Closed]:
    """Return the closed loops for a model, by name."""
    return CLOSED | LARGE if model == "1.1b" else CLOSED
