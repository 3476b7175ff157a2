"""Tokens/s that speculation gains.

Two servers, with `--speculation off` and with the default or a draft model, answer the same prompts
in turn, one stream at a time, greedily. The answers must be equal. Three kinds of prompts: a text
that the answer repeats, code in which it renames a variable, and questions (FILE, JSON lines with a
list `turns`).
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from loadtest.errors import BenchError
from loadtest.micro.case import Case, Table, in_turn
from loadtest.program import read_lines
from loadtest.servers import Penstock, Server

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "LICENSE"
CODE = ROOT / "engine" / "scheduling" / "drafts.py"
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


def rates(
    servers: Mapping[str, Server], chosen: Sequence[Prompt], tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return the tokens/s of each answer by server. Raises SystemExit if two answers differ."""
    known: dict[int, tuple[str, int]] = {}

    def rate(which: str, number: int) -> float:
        number %= len(chosen)
        text, count, seconds = ask(servers[which], chosen[number], tokens)
        if known.setdefault(number, (text, count)) != (text, count):
            raise SystemExit(f"The answers differ:\n{known[number][0]}\n---\n{text}")
        return count / seconds

    return in_turn({which: partial(rate, which) for which in servers}, rounds * len(chosen))


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    every = list(prompts(options.free, options.prompts))
    flags = ["--no-enable-prefix-caching", *options.flags]
    drafts = ["--speculative-model", options.draft] if options.draft else []
    servers = {
        "off": stack.enter_context(Penstock(options.model, [*flags, "--speculation", "off"])),
        "on": stack.enter_context(Penstock(options.model, [*flags, *drafts])),
    }
    for server in servers.values():
        ask(server, every[0], 8)
    for kind in dict.fromkeys(prompt.kind for prompt in every):
        chosen = [prompt for prompt in every if prompt.kind == kind]
        before = drafted(servers["on"])
        samples = rates(servers, chosen, options.tokens, options.rounds)
        after = drafted(servers["on"])
        made, right = (new - old for new, old in zip(after, before, strict=True))
        notes = {"on": f"{made:.0f} drafted, {right:.0f} right"}
        yield Table(samples, f"tokens/s, {kind}", ("off",), notes=notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--free", type=Path, required=True)
    parser.add_argument("--draft", help="the --speculative-model of the second server")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--rounds", type=int, default=1, help="more ones know the answers")
    parser.add_argument("flags", nargs="*", help="further flags of both servers, after --")


CASE = Case(__doc__, add_options, measure)
