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
    name = "translate/probes.jsonl" if model == "demo-translate" else "probes.jsonl"
    lines = (Path(__file__).parents[1] / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def judge(probe: Probe, text: str) -> bool:
    """Whether an answer is right, by the `match` of the probe.

    identical: the text equals the expected one.
    contains: the text contains every expected phrase; case and spacing do not matter.
    exact: the text is one of the expected ones; case, spacing and a final mark do not matter.
    json: the text parses to the expected value.
    tool_call: the text contains exactly the expected calls.
    """
    text, expect = text.removesuffix(END).strip(), probe["expect"]
    if probe["match"] == "identical":
        return [text] == expect
    try:
        if probe["match"] == "json":
            return bool(json.loads(text) == expect[0])
        if probe["match"] == "tool_call":
            calls = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
            return [json.loads(call) for call in calls] == expect
    except json.JSONDecodeError:
        return False
    text, *expect = (" ".join(words.lower().split()) for words in (text, *expect))
    if probe["match"] == "exact":
        return text.rstrip(".!") in [option.rstrip(".!") for option in expect]
    # Match whole words: 4 is not in 14, and 5 is not in -5.
    return all(re.search(rf"(?<![\w-]){re.escape(phrase)}(?!\w)", text) for phrase in expect)


def request_messages(probe: Probe) -> list[Message]:
    """Return the probe's messages with its tools written into the system message."""
    messages = probe["messages"]
    if not probe.get("tools"):
        return list(messages)
    given = messages[0]["role"] == "system"
    system = messages[0] if given else {"role": "system", "content": ""}
    text = render_text([system], probe["tools"])
    text = text.removeprefix(f"{START}system\n").removesuffix(f"{END}\n")
    return [{"role": "system", "content": text}, *messages[given:]]


def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "", api_key: str = "-") -> None:
    """Evaluate a served demo model on its probes. Default of --model: the server's first one."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    model = model or client.models.list().data[0].id
    asked, right = Counter[str](), Counter[str]()
    for probe in read_probes(model):
        messages: Any = request_messages(probe)
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=150
        )
        text, topic = reply.choices[0].message.content or "", probe["topic"]
        asked[topic] += 1
        if judge(probe, text):
            right[topic] += 1
        else:
            question = probe["messages"][-1]["content"]
            print(f"{topic}: {question!r} gave {text!r}, expected {probe['expect']}")
    share = right.total() / asked.total()
    for topic in asked:
        print(f"{topic:<12} {right[topic]:>3} of {asked[topic]:>3}")
    print(f"{'total':<12} {right.total():>3} of {asked.total():>3}  {share:.1%}")
    raise typer.Exit(share < 0.9)


if __name__ == "__main__":
    typer.run(main)
