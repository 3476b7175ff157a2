"""The requests of a load test: the lengths of prompts and answers, and the prefixes they share.

A workload is a stream of Shapes, which is the same for the same seed. `Prose` writes the text of a
Shape. The number of tokens per word is measured on the server (`loadtest/bench.py`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.errors import BenchError

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
    """One request, with lengths in tokens.

    `blocks` names the pieces of its prompt, each of `block_tokens` tokens. Prompts that begin with
    the same names begin with the same text. A `text`, if given, is used as the prompt unchanged.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[str, ...] = ()
    block_tokens: float = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """A named stream of requests; `shapes` and `gaps` are endless.

    `gaps` yields the recorded times between arrivals, scaled to a mean of 1. It is None if no times
    were recorded.
    """

    name: str
    shapes: Callable[[random.Random], Iterator[Shape]]
    longest: int  # prompt plus answer, in tokens
    gaps: Callable[[], Iterator[float]] | None = None
    left_out: int = 0  # requests of a trace that exceed the model's context


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors for the prompt and output lengths of a trace."""

    prompt: float = 1.0
    output: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Scale:
        """Parse `0.05`, or `0.01/0.2` for prompts and answers. Raises BenchError."""
        prompt, _, output = text.partition("/")
        try:
            scale = cls(float(prompt), float(output or prompt))
        except ValueError:
            scale = cls(0.0)
        if not (0 < scale.prompt < 1e3 and 0 < scale.output < 1e3):
            raise BenchError(
                f"--length-scale: {text!r} is not a factor between 0 and 1000; give it as 0.05, or "
                "as 0.01/0.2 for prompts and answers."
            )
        return scale

    def __str__(self) -> str:
        return f"{self.prompt:g}/{self.output:g}"


def poisson(rng: random.Random) -> Iterator[float]:
    """Yield times between independent arrivals, with a mean of 1."""
    while True:
        yield rng.expovariate(1.0)


def fixed(prompt: int, output: int) -> Workload:
    """Return a workload with prompts and answers of fixed lengths and no shared prefixes."""

    def shapes(rng: random.Random) -> Iterator[Shape]:
        while True:
            yield Shape(prompt, output)

    return Workload(f"{prompt}/{output}", shapes, prompt + output)


# For `mix`: share of requests, median prompt, longest prompt, median answer, longest answer.
CHAT, CODE = (0.7, 96, 384, 64, 192), (0.3, 320, 640, 24, 96)
SYSTEM_PROMPTS, SYSTEM_TOKENS = 3, 128


def mix() -> Workload:
    """Return a mix of short chats with one of three system prompts, and code completions.

    Code completions have long prompts and short answers. Lengths are lognormal, like those of
    published traces, and fit in a context of 1024 tokens.
    """

    def length(rng: random.Random, median: int, most: int) -> int:
        return min(most, max(4, round(median * rng.lognormvariate(0, 0.6))))

    def shapes(rng: random.Random) -> Iterator[Shape]:
        salt = rng.getrandbits(64)  # different texts each time, so that no cache has them
        while True:
            chat = rng.random() < CHAT[0]
            _, prompt, most_prompt, output, most_output = CHAT if chat else CODE
            tokens, answer = length(rng, prompt, most_prompt), length(rng, output, most_output)
            if chat:
                system = f"{salt} {rng.randrange(SYSTEM_PROMPTS)}"
                yield Shape(SYSTEM_TOKENS + tokens, answer, (system,), SYSTEM_TOKENS)
            else:
                yield Shape(tokens, answer)

    return Workload("mix", shapes, max(SYSTEM_TOKENS + CHAT[2] + CHAT[4], CODE[2] + CODE[4]))


def workload(name: str, scale: Scale, longest: int | None) -> Workload:
    """Return the workload for a value of `--workload`.

    `longest` is the model's context length, if known. Raises BenchError if the workload is unknown
    or does not fit the model.
    """
    if match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", name):
        chosen = fixed(int(match[1]), int(match[2]))
    elif name == "mix":
        chosen = mix()
    elif Path(name).is_file():
        from loadtest.traces import from_file  # it imports this module

        return from_file(Path(name), scale, longest)
    else:
        raise BenchError(
            f"Unknown workload {name}; give prompt and answer lengths in tokens as `128/64`, or "
            "`mix`, or the path of a file with a trace or prompts."
        )
    if scale != Scale():
        raise BenchError(f"--length-scale applies only to traces; {name} defines its own.")
    if longest and chosen.longest > longest:
        raise BenchError(
            f"The workload {name} has requests of {chosen.longest} tokens, but the model takes at "
            f"most {longest}. Choose a workload with shorter texts."
        )
    return chosen


@dataclass(frozen=True, slots=True)
class Prose:
    """Generates texts of a given number of tokens, from the tokens per word of the server."""

    tokens_per_word: float
    overhead: float  # tokens of the chat template

    def texts(self, workload: Workload, rng: random.Random) -> Iterator[tuple[str, int]]:
        """Yield prompts of a workload without end, each with its number of output tokens."""
        for shape in workload.shapes(rng):
            yield self.text(shape, rng), shape.output_tokens

    def text(self, shape: Shape, rng: random.Random) -> str:
        """Return the prompt of `shape`; `rng` draws the words that no block defines."""
        if shape.text:
            return shape.text
        left = max(1, round((shape.prompt_tokens - self.overhead) / self.tokens_per_word))
        words: list[str] = []
        for block in shape.blocks:
            size = min(left - len(words), round(shape.block_tokens / self.tokens_per_word))
            words += random.Random(block).choices(WORDS, k=size)
        return " ".join(words + rng.choices(WORDS, k=left - len(words)))
