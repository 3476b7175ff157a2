"""Compare models: `python -m engine.offline.compare.command`, with a Comparison as JSON on stdin.

It writes one Report per line, as JSON. At most two models are loaded at a time: the first, and the
one that it is compared with.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import msgspec

from engine.device.parent import die_with_parent
from engine.errors import ConfigError
from engine.offline.compare.candidate import Candidate
from engine.offline.compare.distance import distances
from engine.protocol.compare import Answered, Compared, Comparison, Failed, Report, Working
from engine.protocol.generate import SamplingParams


def compared(asked: Comparison) -> Iterator[Report]:
    """Yield the answers and the distances. Raises ConfigError if a model cannot be loaded."""
    first: Candidate | None = None
    written: list[list[int]] = []
    for number, config in enumerate(asked.models):
        yield Working(f"loading {config.model}")
        candidate = Candidate(config)
        yield Working(f"answers of {config.model}")
        answers = candidate.answers(asked.prompts[number], _params(asked, number))
        for prompt, (tokens, finish) in enumerate(answers):
            yield Answered(number, prompt, tokens, finish)
        texts = [tokens for tokens, _ in answers]
        if first is None:
            first, written = candidate, texts
            continue
        if asked.same_tokens:
            yield Working(f"distances of {asked.models[0].model} and {config.model}")
            yield from _distances(asked, number, (first, candidate), (written, texts))
        del candidate
        gc.collect()


def _params(asked: Comparison, number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        seed=asked.seed,
        stop_token_ids=tuple(asked.end_ids[number]),
    )


def _distances(
    asked: Comparison,
    number: int,
    pair: tuple[Candidate, Candidate],
    answers: tuple[list[list[int]], list[list[int]]],
) -> Iterator[Report]:
    """Yield the distances along the answers of both models of a pair."""
    for place, writer in enumerate((0, number)):
        own, other = pair[place], pair[1 - place]
        for prompt, answer in enumerate(answers[place]):
            ids = asked.prompts[0][prompt]
            found = distances(answer, own.logprobs(ids, answer), other.logprobs(ids, answer))
            yield Compared(number, writer, prompt, found)


def main() -> int:
    die_with_parent()  # Ctrl-C reaches both processes, other signals only the parent
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Comparison)
    try:
        for report in compared(asked):
            _write(report)
    except ConfigError as error:
        _write(Failed(str(error)))
        return 2
    return 0


def _write(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
