"""What a load test asks: how long prompts and answers are and what they share, as text.

A workload is a stream of Shapes, the same for the same seed. `Prose` writes the text of a Shape;
how many words make a token is found out by asking the server (`loadtest/bench.py`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ENGLISH = (
    "the of and to in is it you that he was for on are with as his they be at one have this "
    "from or had by hot but some what there we can out other were all your when up use word "
    "how said an each she which do their time if will way about many then them would write "
    "like so these her long make thing see him two has look more day could go come did my "
    "sound no most number who over know water than call first people may down side been now "
    "find any new work part take get place made live where after back little only round man "
    "year came show every good me give our under name very through just form much great think "
    "say help low line before turn cause same mean differ move right boy old too does tell "
    "sentence set three want air well also play small end put home read hand port large spell "
    "add even land here must big high such follow act why ask men change went light kind off "
    "need house picture try us again animal point mother world"
)
WORDS = ENGLISH.split()


@dataclass(frozen=True, slots=True)
class Shape:
    """One request: lengths in tokens. `blocks` name the pieces its prompt is made of, each of
    `block_tokens`: prompts that begin with the same names begin with the same text."""

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[str, ...] = ()
    block_tokens: int = 0


Shapes = Callable[[random.Random], Iterator[Shape]]


@dataclass(frozen=True, slots=True)
class Workload:
    """`longest` is the largest prompt plus answer, in tokens."""

    name: str
    shapes: Shapes
    longest: int


def fixed(prompt: int, output: int) -> Workload:
    """Every prompt and every answer equally long; nothing shared."""

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            yield Shape(prompt, output)

    return Workload(f"{prompt}/{output}", shapes, prompt + output)


# Of `mix`: share of the requests, median prompt, longest prompt, median answer, longest answer.
CHAT, CODE = (0.7, 96, 384, 64, 192), (0.3, 320, 640, 24, 96)
SYSTEM_PROMPTS, SYSTEM_TOKENS = 3, 128


def mix() -> Workload:
    """Short chats under one of three system prompts, and long code contexts with short answers;
    lengths are lognormal, as those of the published traces, and fit a context of 1024."""

    def length(rng: random.Random, median: int, most: int) -> int:
        return min(most, max(4, round(median * rng.lognormvariate(0, 0.6))))

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            chat = rng.random() < CHAT[0]
            _, prompt, most_prompt, output, most_output = CHAT if chat else CODE
            tokens, answer = length(rng, prompt, most_prompt), length(rng, output, most_output)
            if chat:
                system = f"system {rng.randrange(SYSTEM_PROMPTS)}"
                yield Shape(SYSTEM_TOKENS + tokens, answer, (system,), SYSTEM_TOKENS)
            else:
                yield Shape(tokens, answer)

    return Workload("mix", shapes, max(SYSTEM_TOKENS + CHAT[2] + CHAT[4], CODE[2] + CODE[4]))


class UnknownWorkload(Exception):
    """No workload has that name."""


def workload(name: str) -> Workload:
    """By what `--workload` was given; raises UnknownWorkload."""
    if match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", name):
        return fixed(int(match[1]), int(match[2]))
    if name == "mix":
        return mix()
    raise UnknownWorkload(
        f"There is no workload {name}: give `mix`, or the tokens of prompt and answer as `128/64`."
    )


@dataclass(frozen=True, slots=True)
class Prose:
    """Words for a number of tokens, as measured on the server that is asked."""

    tokens_per_word: float
    overhead: float  # tokens of the chat template

    def text(self, shape: Shape, rng: random.Random) -> str:
        """The prompt of `shape`; what no block names is drawn from `rng`."""
        left = max(1, round((shape.prompt_tokens - self.overhead) / self.tokens_per_word))
        words: list[str] = []
        for block in shape.blocks:
            size = min(left - len(words), round(shape.block_tokens / self.tokens_per_word))
            words += random.Random(block).choices(WORDS, k=size)
        return " ".join(words + rng.choices(WORDS, k=left - len(words)))
