"""How many tokens of a prompt each server reuses, and whether reuse changes its answers.

A state model can reuse a prompt only up to a place where the server has kept its state. Each case
is a pair of requests: the second prompt begins like the first. One server gets both, a fresh one
gets only the second. The answers are greedy, and their log-probabilities are compared, too.

`python -m loadtest.peers.prefix_hits --model lfm2` prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loadtest.bench_peers import make_contenders, model_folder
from loadtest.http_client import Target, exchange
from loadtest.peers.contenders import OverHttp
from loadtest.peers.jobs import JOB_S, Room, Words
from loadtest.peers.report import OURS
from loadtest.program import run_program
from loadtest.schedule import Ask

LENGTH, NEW = 400, 24  # tokens of a first prompt and of each answer
PREFIX, SHARED, TURN = 390, 250, 40
ROOM = Room(1, LENGTH + TURN + 2 * NEW)
OVER_HTTP = ("llama.cpp", "vllm")


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one for each id
    reused: int  # tokens of the prompt


@dataclass(frozen=True)
class Hit:
    """The second request of a case. `error` is the largest difference of log-probabilities."""

    prompt: int  # tokens
    reused: int
    equal: bool  # the answer's ids are those of a fresh server
    error: float  # infinite if the ids differ


Send = Callable[[list[int]], Answer]
# Each returns the second prompt of its first prompt, the answer's ids, and further tokens.
CASES: dict[str, Callable[[list[int], list[int], list[int]], list[int]]] = {
    "the same again": lambda first, answer, more: first,
    f"its first {PREFIX} tokens": lambda first, answer, more: first[:PREFIX],
    f"{SHARED} shared": lambda first, answer, more: first[:SHARED] + more[: LENGTH - SHARED],
    "next turn": lambda first, answer, more: first + answer + more[:TURN],
}


def answer_of(body: Mapping[str, Any]) -> Answer:
    """Read a response of /v1/completions.

    llama.cpp has ids and log-probabilities in one list. The others follow OpenAI's older format,
    with `token_ids` next to it.
    """
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    details = body["usage"].get("prompt_tokens_details") or {}
    reused = details.get("cached_tokens")
    if reused is None:
        reused = body.get("timings", {}).get("cache_n", 0)
    if "content" in logprobs:
        ids = [token["id"] for token in logprobs["content"]]
        values = [token["logprob"] for token in logprobs["content"]]
    else:
        ids, values = choice["token_ids"], logprobs["token_logprobs"]
    return Answer(tuple(ids), tuple(values), reused)


def pairs(send: Send, words: Words) -> dict[str, tuple[list[int], Answer]]:
    """Send both requests of all cases; return each second prompt and its answer."""
    found = {}
    for name, second_of in CASES.items():
        [first], [more] = (words.prompts(1, LENGTH, f"{part} {name}") for part in ("first", "more"))
        second = second_of(first, list(send(first).ids), more)
        found[name] = second, send(second)
    return found


def compared(after: Answer, cold: Answer, prompt: int) -> Hit:
    """Compare the answer after a hit with that of a fresh server.

    Raises RuntimeError if the fresh server reused tokens, or if an answer is too short.
    """
    if cold.reused:
        raise RuntimeError(f"a fresh server reused {cold.reused} tokens")
    if not len(after.ids) == len(cold.ids) == NEW:
        raise RuntimeError(f"answers of {len(after.ids)} and {len(cold.ids)} tokens, not {NEW}")
    if after.ids != cold.ids:
        return Hit(prompt, after.reused, False, float("inf"))
    both = zip(after.logprobs, cold.logprobs, strict=True)
    return Hit(prompt, after.reused, True, max(abs(a - b) for a, b in both))


def hits(contender: OverHttp, words: Words) -> dict[str, Hit]:
    """Return what a contender reuses in each case."""
    with contender.serving(ROOM) as server:
        warm = pairs(sender(server.address, contender.fields), words)
    with contender.serving(ROOM) as server:
        send = sender(server.address, contender.fields)
        cold = {name: send(second) for name, (second, _) in warm.items()}
    return {
        name: compared(answer, cold[name], len(second)) for name, (second, answer) in warm.items()
    }


def sender(address: str, fields: dict[str, Any]) -> Send:
    target = Target.parse(address)

    def send(prompt: list[int]) -> Answer:
        body = Ask(0.0, prompt, NEW).body | {"logprobs": 1, "return_token_ids": True} | fields
        done = asyncio.run(exchange(target, "/v1/completions", body, limit_s=JOB_S))
        if done.status != 200:
            raise RuntimeError(f"status {done.status}: {done.message or done.body.decode()[:300]}")
        return answer_of(json.loads(done.body))

    return send


def table(found: Mapping[str, Mapping[str, Hit]]) -> str:
    """Return a Markdown table of the cases, with a column for each contender."""
    lines = [f"| second prompt | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for name in CASES:
        cells = [cell(of_one[name]) for of_one in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(hit: Hit) -> str:
    verdict = f"equal, {hit.error:.0e}" if hit.equal else "**differs**"
    return f"{hit.reused} of {hit.prompt} · {verdict}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lfm2", help="as in `make bench-peers`")
    parser.add_argument("--peers", nargs="*", default=OVER_HTTP, choices=OVER_HTTP)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    root = options.environments.absolute()
    with model_folder(options.model, root) as folder:
        words = Words(Tokenizer.from_file(str(folder / "tokenizer.json")))
        made, failed = make_contenders(options.peers, folder, root)
        found = {}
        for name in (OURS, *options.peers):
            contender = made.get(name)
            if not isinstance(contender, OverHttp):
                continue
            try:
                found[name] = hits(contender, words)
            except (RuntimeError, KeyError, ValueError) as error:
                failed[name] = str(error)[-300:] or type(error).__name__
    print(table(found))
    print("\n".join(f"FAILED {name}: {why}" for name, why in failed.items()))


if __name__ == "__main__":
    run_program(main)
