"""Evaluate a served demo model on its probes.jsonl.

    python -m engine.offline.demo_training.evaluate --base-url http://127.0.0.1:8000/v1

Sends every probe to a running server at temperature 0, with its tools, its `reasoning_effort` and
its JSON schema as fields of the request. A probe with `behind` comes after a long text, and one
with `picture` after the picture of that seed. Prints the wrong answers and the share of right ones
by topic; the exit code is 1 below 85 %. It needs the openai client but no torch.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import typer
from PIL.Image import Image
from tokenizers import Tokenizer

from engine.checkpoint.folder import DEMO_FOLDERS
from engine.config import DEMO_MODEL
from engine.offline.demo_training.chat import END, FOLDER, THOUGHT_END
from engine.offline.demo_training.vision_text import probe_picture

Probe = dict[str, Any]


def read_probes(model: str = "demo") -> list[Probe]:
    folder = Path(__file__).parents[2] / "demo"
    if model in DEMO_FOLDERS and model != DEMO_MODEL:
        folder /= DEMO_FOLDERS[model]
    text = (folder / "probes.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def judge(probe: Probe, text: str) -> bool:
    """Whether an answer is right, by the `match` of the probe.

    identical: the text equals the expected one.
    contains: the text contains every expected phrase; case and spacing do not matter.
    exact: the text is one of the expected ones; case, spacing and a final mark do not matter.
    json: the text parses to the expected value.
    tool_call: the text contains exactly the expected calls.
    report: as contains, and the text has no call.

    With an `effort`, the text begins with a thought that contains every phrase of `thought`.
    """
    text = text.removesuffix(END).strip()
    if "effort" in probe:
        thought, end, text = text.partition(THOUGHT_END)
        thought = normalized(thought)
        is_expected = all(contains(thought, normalized(phrase)) for phrase in probe["thought"])
        if not end or not is_expected:
            return False
        text = text.strip()
    expect = probe["expect"]
    match probe["match"]:
        case "identical":
            return [text] == expect
        case "json":
            return parsed([text]) == expect[:1]
        case "tool_call":
            calls = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
            return parsed(calls) == expect
        case "report" if "<tool_call>" in text:
            return False
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


def lengthened(probe: Probe) -> Probe:
    """Return the probe behind `tokens` tokens of other text, at the place that it names.

    system: in a system message; document: before the question, in the same message; tools: in the
    definitions of many tools, and a system message of the remaining tokens.
    """
    if "behind" not in probe:
        return probe
    place, tokens = probe["behind"]["place"], probe["behind"]["tokens"]
    *earlier, last = probe["messages"]
    if place == "document":
        text = f"{long_text(tokens)}\n\n{last['content']}"
        return probe | {"messages": [*earlier, {**last, "content": text}]}
    longer = dict(probe)
    if place == "tools":
        others = json.loads((FOLDER.parent / "many_tools.json").read_text(encoding="utf-8"))
        written_tools = [json.dumps(tool) for tool in others]
        longer["tools"] = [*others, *probe["tools"]]
        tokens -= len(tokenizer().encode("\n".join(written_tools)).ids)
    if tokens > 0:
        system = {"role": "system", "content": long_text(tokens)}
        longer["messages"] = [system, *probe["messages"]]
    return longer


def long_text(tokens: int) -> str:
    """Return the first tokens of an agent's system prompt and the licence of Penstock, twice."""
    prompt = (FOLDER.parent / "long_prompt.md").read_text(encoding="utf-8")
    licence = (FOLDER.parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = tokenizer().encode(2 * (prompt + licence)).ids[:tokens]
    return tokenizer().decode(ids)


def shown(probe: Probe) -> Probe:
    """Return the probe with its picture, if it has one, in front of the question."""
    if "picture" not in probe:
        return probe
    (message,) = probe["messages"]
    picture = probe_picture(probe["topic"], probe["picture"])
    parts = [
        {"type": "image_url", "image_url": {"url": png_url(picture)}},
        {"type": "text", "text": message["content"]},
    ]
    return probe | {"messages": [{**message, "content": parts}]}


def png_url(picture: Image) -> str:
    """Return a picture as a data: URL."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def request_fields(probe: Probe) -> dict[str, Any]:
    """Return the fields of the probe's request, as the Chat Completions API has them."""
    probe = shown(lengthened(probe))
    fields: dict[str, Any] = {"messages": probe["messages"]}
    if "tools" in probe:
        fields["tools"] = probe["tools"]
    if "effort" in probe:
        fields["reasoning_effort"] = probe["effort"]
    if "schema" in probe:
        schema = {"name": "answer", "schema": probe["schema"], "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def written(message: dict[str, Any]) -> str:
    """Return the text of an answer's message in the model's own format, as `judge` reads it."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or []:
        function = call["function"]
        name, arguments = json.dumps(function["name"]), function["arguments"]
        written_call = f'{{"name": {name}, "arguments": {arguments}}}'
        text += f"\n<tool_call>\n{written_call}\n</tool_call>"
    thought = message.get("reasoning_content")
    return f"{thought}\n{THOUGHT_END}\n\n{text}" if thought else text


def main(
    base_url: str = "http://127.0.0.1:8000/v1",
    model: str = "",
    api_key: str = "-",
) -> None:
    """Evaluate a served demo model. Default of --model: the server's first one."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    model = model or client.models.list().data[0].id
    total = Counter[str]()
    right = Counter[str]()
    for probe in read_probes(model):
        reply = client.chat.completions.create(
            model=model, temperature=0, max_tokens=150, **request_fields(probe)
        )
        text = written(reply.choices[0].message.model_dump())
        topic = probe["topic"]
        total[topic] += 1
        if judge(probe, text):
            right[topic] += 1
        else:
            question = probe["messages"][-1]["content"]
            print(f"{topic}: {question!r} gave {text!r}, expected {probe['expect']}")
    share = right.total() / total.total()
    print_table(right, total, share)
    raise typer.Exit(share < 0.85)


def print_table(right: Counter[str], total: Counter[str], share: float) -> None:
    """Print the number of right answers by topic, and their share of all."""
    for topic in total:
        print(f"{topic:<12} {right[topic]:>3} of {total[topic]:>3}")
    print(f"{'total':<12} {right.total():>3} of {total.total():>3}  {share:.1%}")


if __name__ == "__main__":
    typer.run(main)
