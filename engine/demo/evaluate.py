"""Judges the demo model on probes.jsonl: `python -m engine.demo.evaluate --base-url
http://127.0.0.1:8000/v1`.

Asks a running server every probe at temperature 0 and prints the score by topic and the wrong
answers; the exit code is 1 below 90 %. Neither torch nor transformers is needed, and the openai
client only for this command. Tools are written into the system message in the chat template's
own form, so any server can be asked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.demo.chat import Message, system_text

PROBES = Path(__file__).parent / "probes.jsonl"
FLOOR = 0.9

Probe = dict[str, Any]


def read_probes(path: Path = PROBES) -> list[Probe]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def words(text: str) -> str:
    """Lower case with single spaces: what two answers are compared in."""
    return " ".join(text.lower().split())


def contains(text: str, expected: str) -> bool:
    """Whether `expected` stands in `text` as whole words: 4 is not in 14, and 5 is not in -5."""
    found = re.escape(words(expected))
    return re.search(rf"(?<![\w-]){found}(?!\w)", words(text)) is not None


def called(text: str, tool_calls: list[Any] | None) -> list[dict[str, Any]]:
    """Tool calls as {"name", "arguments"}, parsed by the server or still in the text."""
    if tool_calls:
        functions = [
            call["function"] if isinstance(call, dict) else call.function.model_dump()
            for call in tool_calls
        ]
        return [
            {
                "name": f["name"],
                "arguments": json.loads(f["arguments"])
                if isinstance(f["arguments"], str)
                else f["arguments"],
            }
            for f in functions
        ]
    return [
        json.loads(body)
        for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    ]


def judge(probe: Probe, text: str, tool_calls: list[Any] | None = None) -> bool:
    """Whether an answer is right, by the probe's `match`.

    contains: every expected phrase stands in the text. exact: the text is one of the expected.
    json: the text parses to the expected value. tool_call: exactly the expected call was made.
    """
    text = text.removesuffix("<|im_end|>").strip()
    expect = probe["expect"]
    try:
        if probe["match"] == "json":
            return bool(json.loads(text) == expect[0])
        if probe["match"] == "tool_call":
            return called(text, tool_calls) == expect
    except json.JSONDecodeError:
        return False
    if probe["match"] == "exact":
        return words(text).rstrip(".!") in [words(option).rstrip(".!") for option in expect]
    return all(contains(text, phrase) for phrase in expect)


@dataclass
class Score:
    """Right and asked per topic, and the wrong answers."""

    right: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, probe: Probe, text: str, good: bool) -> None:
        topic = probe["topic"]
        self.asked[topic] = self.asked.get(topic, 0) + 1
        self.right[topic] = self.right.get(topic, 0) + good
        if not good:
            question = probe["messages"][-1]["content"]
            self.wrong.append(f"{topic}: {question!r} gave {text!r}, expected {probe['expect']}")

    @property
    def share(self) -> float:
        return sum(self.right.values()) / max(sum(self.asked.values()), 1)

    def table(self) -> str:
        rows = [
            f"{topic:<12} {self.right[topic]:>3} of {asked:>3}"
            for topic, asked in self.asked.items()
        ]
        right, asked = sum(self.right.values()), sum(self.asked.values())
        total = f"{'total':<12} {right:>3} of {asked:>3}  {self.share:.1%}"
        return "\n".join([*rows, *self.wrong, total])


def request_messages(probe: Probe) -> list[Message]:
    """The probe's messages with its tools written into the system message."""
    messages, tools = probe["messages"], probe.get("tools", [])
    if not tools:
        return list(messages)
    first = messages[0]["role"] == "system"
    system = system_text(messages[0]["content"] if first else "", tools)
    return [{"role": "system", "content": system}, *messages[first:]]


def ask_server(base_url: str, model: str | None, api_key: str) -> Score:
    """Every probe through the official client, one after another."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    name = model or client.models.list().data[0].id
    score = Score()
    for probe in read_probes():
        messages: Any = request_messages(probe)
        reply = client.chat.completions.create(
            model=name, messages=messages, temperature=0, max_tokens=150
        )
        message = reply.choices[0].message
        text, calls = message.content or "", message.tool_calls
        score.add(probe, text, judge(probe, text, list(calls) if calls else None))
    return score


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Score a running server on the demo model's probes."
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first model the server lists")
    parser.add_argument("--api-key", default="none")
    arguments = parser.parse_args()
    score = ask_server(arguments.base_url, arguments.model, arguments.api_key)
    print(score.table())
    return 0 if score.share >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
