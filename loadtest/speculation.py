"""Measure what speculation gains: `python -m loadtest.speculation --model FOLDER --free FILE`.

Two servers, with `--speculation off` and with the default or a draft model, answer the same prompts
in turn, one stream at a time, greedily. The answers must be equal. Three kinds of prompts: a text
that the answer repeats, code in which it renames a variable, and questions (FILE, JSON lines with a
list `turns`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from loadtest.errors import BenchError
from loadtest.program import read_lines, run_program
from loadtest.servers import Penstock, Server

TEXT = Path(__file__).parent.parent / "LICENSE"
CODE = Path(__file__).parent.parent / "engine" / "speculative" / "drafts.py"
LINES = 12  # of the text in a prompt
RENAMED = (("drafted", "guessed"), ("accepted", "kept"), ("pause", "rest"), ("length", "size"))


class Prompt(NamedTuple):
    kind: str
    path: str
    body: dict[str, Any]


class Answer(NamedTuple):
    text: str
    tokens: int
    seconds: float


def question_of(line: Mapping[str, Any]) -> str:
    """Return the first question of a line of MT-Bench, or its `prompt`. Raises BenchError."""
    turns = line.get("turns") or [line.get("prompt")]
    if not (isinstance(turns, list) and isinstance(turns[0], str)):
        raise BenchError("Each line needs `turns`, a list of texts, or `prompt`.")
    return turns[0]


def prompts(free: Path, count: int) -> Iterator[Prompt]:
    """Yield `count` prompts of each kind."""
    lines = [line for line in TEXT.read_text().splitlines() if line.strip()]
    code = CODE.read_text()
    questions = [question_of(line) for line in read_lines(free)]
    if not questions:
        raise BenchError(f"{free} has no questions.")
    for number in range(count):
        part = "\n".join(lines[number * LINES : (number + 1) * LINES])
        begun = part[: len(part) // 4]
        yield Prompt("copy", "completions", {"prompt": f"{part}\n\n{part}\n\n{begun}"})
    for number in range(count):
        old, new = RENAMED[number % len(RENAMED)]
        edited = code.replace(old, new)
        text = f"```python\n{code}```\nWith {new} instead of {old}:\n```python\n{edited}"
        missing = (2 + number % 3) * len(edited) // 5
        yield Prompt("edit", "completions", {"prompt": text[:-missing]})
    for number in range(count):
        messages = [{"role": "user", "content": questions[number * len(questions) // count]}]
        yield Prompt("free", "chat/completions", {"messages": messages})


def ask(server: Server, prompt: Prompt, tokens: int) -> Answer:
    body = {**prompt.body, "temperature": 0, "max_tokens": tokens}
    begin = time.monotonic()
    found = httpx2.post(f"http://{server.address}/v1/{prompt.path}", json=body, timeout=600)
    seconds = time.monotonic() - begin
    choice = found.raise_for_status().json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, found.json()["usage"]["completion_tokens"], seconds)


def drafted(server: Server) -> tuple[float, float]:
    """Return how many tokens were drafted so far, and how many of them were right."""
    page = httpx2.get(f"http://{server.address}/metrics", timeout=60).text
    names = "draft_tokens", "accepted_tokens"
    found = [line for line in page.splitlines() if line.startswith("penstock:spec_decode_num_")]
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in found}
    drafts, right = (values[f"penstock:spec_decode_num_{name}_total"] for name in names)
    return drafts, right


def measure(servers: Sequence[Server], every: Sequence[Prompt], tokens: int, rounds: int) -> None:
    """Print a line for each kind of prompt. Raises SystemExit if two answers differ."""
    sys.stdout.write("| prompts | tokens | off, tokens/s | on | ratio | drafted | right |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for kind in dict.fromkeys(prompt.kind for prompt in every):
        chosen = [prompt for prompt in every if prompt.kind == kind]
        before = drafted(servers[1])
        ratios: list[float] = []
        rates: tuple[list[float], list[float]] = [], []
        total = 0
        for number, prompt in enumerate(prompt for _ in range(rounds) for prompt in chosen):
            order = (0, 1) if number % 2 else (1, 0)
            answers = {which: ask(servers[which], prompt, tokens) for which in order}
            if answers[0][:2] != answers[1][:2]:
                raise SystemExit(f"The answers differ:\n{answers[0].text}\n---\n{answers[1].text}")
            ratios.append(answers[0].seconds / answers[1].seconds)
            for which, answer in answers.items():
                rates[which].append(answer.tokens / answer.seconds)
            total += answers[0].tokens
        drafts, right = (
            after - old for after, old in zip(drafted(servers[1]), before, strict=True)
        )
        off, on = map(statistics.median, rates)
        sys.stdout.write(
            f"| {kind} | {total} | {off:.0f} | {on:.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {drafts:.0f} | {right:.0f} |\n"
        )
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.speculation", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--free", type=Path, required=True)
    parser.add_argument("--draft", help="the --speculative-model of the second server")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--rounds", type=int, default=1, help="more ones know the answers")
    parser.add_argument("flags", nargs="*", help="further flags of both servers, after --")
    given = parser.parse_args(arguments)
    every = list(prompts(given.free, given.prompts))
    flags = ["--no-enable-prefix-caching", *given.flags]
    drafts = ["--speculative-model", given.draft] if given.draft else []
    with (
        Penstock(given.model, [*flags, "--speculation", "off"]) as plain,
        Penstock(given.model, [*flags, *drafts]) as drafting,
    ):
        for server in (plain, drafting):
            ask(server, every[0], 8)
        measure([plain, drafting], every, given.tokens, given.rounds)


if __name__ == "__main__":
    run_program(main)
