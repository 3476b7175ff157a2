"""Evaluate a served demo model on its probes.jsonl.

    python -m engine.demo.training.evaluate --base-url http://127.0.0.1:8000/v1

Sends every probe to a running server at temperature 0. Prints the wrong answers and the share of
right ones by topic; the exit code is 1 below 90 %. It needs the openai client but no torch. Tools
are written into the system message in the form of the chat template, so any server will do.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from engine.demo.training.chat import END, START, Message, render_text

Probe = dict[str, Any]


def read_probes(model: str = "demo") -> list[Probe]:
    folder = Path(__file__).parents[1]
    if model == "demo-translate":
        folder /= "translate"
    text = (folder / "probes.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def judge(probe: Probe, text: str) -> bool:
    """Whether an answer is right, by the `match` of the probe.

    identical: the text equals the expected one.
    contains: the text contains every expected phrase; case and spacing do not matter.
    exact: the text is one of the expected ones; case, spacing and a final mark do not matter.
    json: the text parses to the expected value.
    tool_call: the text contains exactly the expected calls.
    """
    text = text.removesuffix(END).strip()
    expect = probe["expect"]
    match probe["match"]:
        case "identical":
            return [text] == expect
        case "json":
            return parsed([text]) == expect[:1]
        case "tool_call":
            calls = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
            return parsed(calls) == expect
        case "exact":
            options = [normalized(option).rstrip(".!") for option in expect]
            return normalized(text).rstrip(".!") in options
    text = normalized(text)
    return all(contains(text, normalized(phrase)) for phrase in expect)


def parsed(texts: list[str]) -> list[Any] | None:
    """Return the values of JSON texts, or None if one of them is no JSON."""
    try:
        return [json.loads(text) for text in texts]
    except json.JSONDecodeError:
        return None


def normalized(text: str) -> str:
    """Return the text in lower case, with single spaces."""
    return " ".join(text.lower().split())


def contains(text: str, phrase: str) -> bool:
    """Whether the text contains the phrase as whole words: 4 is not in 14, and 5 is not in -5."""
    return re.search(rf"(?<![\w-]){re.escape(phrase)}(?!\w)", text) is not None


def request_messages(probe: Probe) -> list[Message]:
    """Return the probe's messages with its tools written into the system message."""
    messages = probe["messages"]
    if not probe.get("tools"):
        return list(messages)
    system = {"role": "system", "content": ""}
    if messages[0]["role"] == "system":
        system, *messages = messages
    text = render_text([system], probe["tools"])
    text = text.removeprefix(f"{START}system\n")
    text = text.removesuffix(f"{END}\n")
    return [{"role": "system", "content": text}, *messages]


def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "", api_key: str = "-") -> None:
    """Evaluate a served demo model on its probes. Default of --model: the server's first one."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    model = model or client.models.list().data[0].id
    total = Counter[str]()
    right = Counter[str]()
    for probe in read_probes(model):
        messages: Any = request_messages(probe)
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=150
        )
        text = reply.choices[0].message.content or ""
        topic = probe["topic"]
        total[topic] += 1
        if judge(probe, text):
            right[topic] += 1
        else:
            question = probe["messages"][-1]["content"]
            print(f"{topic}: {question!r} gave {text!r}, expected {probe['expect']}")
    share = right.total() / total.total()
    print_table(right, total, share)
    raise typer.Exit(share < 0.9)


def print_table(right: Counter[str], total: Counter[str], share: float) -> None:
    """Print the number of right answers by topic, and their share of all."""
    for topic in total:
        print(f"{topic:<12} {right[topic]:>3} of {total[topic]:>3}")
    print(f"{'total':<12} {right.total():>3} of {total.total():>3}  {share:.1%}")


if __name__ == "__main__":
    typer.run(main)
