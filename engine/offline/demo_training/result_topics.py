"""Results of tools in the third stage: sentences, JSON, lists, numbers, errors or nothing.

The report of a result is a text that quotes it, so that a tool loop ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine.offline.demo_training.agent_forms import (
    agent_material,
    agent_words,
    draw_number,
    draw_place,
    draw_thing,
    draw_word,
    fill,
)
from engine.offline.demo_training.chat import dump
from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.text import ToolResult
from engine.offline.demo_training.tool_topics import Errand, ToolKind, draw_value

FINAL_MARKS = ".!?"
VALUES = ("any", "number", "clock")  # results that a tool's own report names
STATES: list[dict[str, Any]] = [
    {"success": True},
    {"status": "ok"},
    {"ok": True},
    {"error": None},
]
MOST_FIELDS = 6  # of a record, that a report quotes


def say(kind: str, text: str = "") -> str:
    """Return the model's sentence about a result of a kind."""
    (form,) = agent_material().forms[kind]
    return form.format(text)


def draw_result(rng: MaterialDraws, errand: Errand, kind: ToolKind) -> Errand:
    """Return a call with another result. A tool that returns values keeps its own value."""
    draw = rng.weighted(RESULTS)
    if draw in (number, wrapped_number) and kind.result in VALUES:
        return errand
    result = draw(rng)
    return errand._replace(result=result.content, report=result.sentence)


def ended(text: str) -> str:
    """Return a text with a final mark."""
    return text if text[-1] in FINAL_MARKS else f"{text}."


def sentence(rng: MaterialDraws) -> ToolResult:
    """Return a line of text. If more lines follow, the report quotes the first one."""
    text = line(rng)
    content = text
    if rng.chance(0.12):
        content = dump(text)
    elif rng.chance(0.12):
        more = [line(rng) for _ in range(rng.randint(1, 4))]
        content = "\n".join([text, *more])
    return ToolResult(content, ended(text))


def line(rng: MaterialDraws) -> str:
    """Return one or two sentences, or words without a meaning."""
    if rng.chance(0.2):
        return " ".join(draw_any(rng) for _ in range(rng.randint(2, 9)))
    text = fill(rng, "sentences")
    if rng.chance(0.15):
        text = f"{ended(text)} {fill(rng, 'sentences')}"
    return text[0].upper() + text[1:] if rng.chance(0.6) else text


def draw_any(rng: MaterialDraws) -> str:
    draw = rng.choice([draw_word, draw_thing, draw_place, draw_number])
    return draw(rng)


def wrapped(rng: MaterialDraws) -> ToolResult:
    """Return a sentence inside a JSON object or MCP's list of text parts."""
    text = line(rng)
    if rng.chance(0.2):
        return ToolResult(dump([{"type": "text", "text": text}]), ended(text))
    return ToolResult(wrap(rng, text), ended(text))


def wrapped_number(rng: MaterialDraws) -> ToolResult:
    value = draw_value(rng, rng.choice(["number", "decimal"])).json
    return ToolResult(wrap(rng, value), say("number", str(value)))


def wrap(rng: MaterialDraws, value: Any) -> str:
    """Return a JSON object with one value and, sometimes, the state of the call."""
    record = {rng.choice(agent_words("wrappers")): value}
    if rng.chance(0.25):
        state: dict[str, Any] = rng.choice(STATES)
        record = state | record if rng.chance(0.5) else record | state
    return written_json(rng, record)


def written_json(rng: MaterialDraws, value: Any) -> str:
    """Return JSON as tools write it: most often on one line, sometimes indented or dense."""
    kind = rng.random()
    if kind < 0.7:
        return dump(value)
    if kind < 0.85:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2)


def record(rng: MaterialDraws) -> ToolResult:
    """Return a JSON object, sometimes with an object or a list inside."""
    values = draw_fields(rng, rng.randint(1, 5))
    if rng.chance(0.2):
        name = rng.choice(agent_words("keys"))
        values[name] = draw_fields(rng, rng.randint(1, 3))
    elif rng.chance(0.15):
        name = rng.choice(agent_words("keys"))
        values[name] = [draw_any(rng) for _ in range(rng.randint(1, 3))]
    report = say("fields", ", ".join(spoken_fields(values)[:MOST_FIELDS]))
    outer = {rng.choice(agent_words("wrappers")): values} if rng.chance(0.2) else values
    return ToolResult(written_json(rng, outer), report)


def draw_fields(rng: MaterialDraws, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = rng.choice(agent_words("keys"))
        if rng.chance(0.15):
            key = f"{key}_{rng.choice(agent_words('keys'))}"
        elif rng.chance(0.1):
            key = rng.coined_word()
        values[key] = draw_field(rng)
    return values


def draw_field(rng: MaterialDraws) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return draw_value(rng, rng.choice(["number", "number", "decimal"])).json
    if kind < 0.55:
        return rng.choice([True, False, None])
    if kind < 0.65:
        return rng.choice(agent_words("skies"))
    return draw_any(rng)


def spoken_fields(values: dict[str, Any]) -> list[str]:
    """Return each field of a record as `key value`. Those of an inner record stand alone."""
    fields: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            fields += spoken_fields(value)
        elif isinstance(value, list):
            fields.append(f"{key} {' and '.join(spoken(item) for item in value)}")
        else:
            fields.append(f"{key} {spoken(value)}")
    return fields


def spoken(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def listed(rng: MaterialDraws) -> ToolResult:
    """Return a JSON list of words, numbers or records, or lines with marks."""
    count = rng.randint(1, 5)
    if rng.chance(0.3):
        keys = list(draw_fields(rng, 2))
        records = [{key: draw_field(rng) for key in keys} for _ in range(min(count, 3))]
        items = [" ".join(spoken_fields(one)) for one in records]
        return ToolResult(written_json(rng, records), say("listed", "; ".join(items)))
    draw = rng.choice([draw_any, draw_thing, draw_number, lambda rng: fill(rng, "sentences")])
    items = [draw(rng).rstrip(FINAL_MARKS) for _ in range(count)]
    report = say("listed", "; ".join(items))
    if rng.chance(0.25):
        mark = rng.choice(["- ", "* ", "• "])
        return ToolResult("\n".join(mark + item for item in items), report)
    values = [int(item) if item.lstrip("-").isdigit() else item for item in items]
    if rng.chance(0.25):
        key = rng.choice([*agent_words("wrappers"), "results", "items"])
        return ToolResult(written_json(rng, {key: values}), report)
    return ToolResult(written_json(rng, values), report)


def number(rng: MaterialDraws) -> ToolResult:
    """Return a number, sometimes with a unit."""
    value = str(draw_value(rng, rng.choice(["number", "decimal"])).json)
    if rng.chance(0.15):
        value = f"-{value}"
    if rng.chance(0.3):
        value += rng.choice([" ", ""]) + rng.choice(agent_words("units"))
    return ToolResult(value, say("number", value))


def error(rng: MaterialDraws) -> ToolResult:
    """Return the text of a tool that failed, plain or as JSON."""
    text = fill(rng, "errors")
    if rng.chance(0.4):
        text = text[0].upper() + text[1:]
    report = say("error", ended(text))
    kind = rng.random()
    if kind < 0.55:
        return ToolResult(rng.choice(agent_material().forms["error openings"]) + text, report)
    if kind < 0.8:
        return ToolResult(written_json(rng, {"error": text}), report)
    inner = {"code": rng.randint(400, 504), "message": text}
    if rng.chance(0.5):
        return ToolResult(written_json(rng, {"error": inner}), report)
    failed = {"success": False} if rng.chance(0.5) else {"status": "error"}
    return ToolResult(written_json(rng, failed | {rng.choice(["error", "message"]): text}), report)


def nothing(rng: MaterialDraws) -> ToolResult:
    content = rng.choice(
        ["", "null", "[]", "{}", "None", '""', '{"result": null}', '{"results": []}']
    )
    return ToolResult(content, say("nothing"))


# Each kind of result and its relative weight.
RESULTS: dict[Callable[[MaterialDraws], ToolResult], float] = {
    sentence: 32,
    wrapped: 14,
    wrapped_number: 2,
    record: 16,
    listed: 14,
    number: 8,
    error: 14,
    nothing: 2,
}
