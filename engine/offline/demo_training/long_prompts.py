"""Text without a meaning for the model: long system prompts, documents and tools of agents.

The model learns to answer behind it, and not to follow it.
"""

from __future__ import annotations

import json
from typing import Any

from engine.offline.demo_training.agent_forms import (
    agent_words,
    draw_code,
    draw_word,
    fill,
)
from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.result_topics import draw_fields
from engine.offline.demo_training.text import Tool

SECTIONS = {"prose": 6, "list": 4, "heading": 2, "salad": 3, "code": 1.5, "letters": 0.5}
TYPES = ("string", "string", "string", "integer", "number", "boolean", "array", "object", "enum")


def long_text(rng: MaterialDraws, size: int) -> str:
    """Return at least `size` characters of instructions, lists, code and words."""
    sections: list[str] = []
    length = 0
    while length < size:
        section = draw_section(rng)
        sections.append(section)
        length += len(section) + 1
    return rng.choice(["\n", "\n\n"]).join(sections)


def draw_section(rng: MaterialDraws) -> str:
    match rng.weighted(SECTIONS):
        case "prose":
            return " ".join(fill(rng, "rules") for _ in range(rng.randint(1, 8)))
        case "list":
            return draw_list(rng)
        case "heading":
            return fill(rng, "headings")
        case "salad":
            return salad(rng, rng.randint(5, 60))
        case "code":
            return draw_code_block(rng)
    return "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(5, 80)))


def draw_list(rng: MaterialDraws) -> str:
    """Return lines with marks or numbers."""
    mark = rng.choice(["- ", "* ", "{}. ", "{}) "])
    lines = []
    for index in range(rng.randint(2, 8)):
        text = fill(rng, "rules") if rng.chance(0.6) else salad(rng, rng.randint(2, 12))
        lines.append(mark.format(index + 1) + text)
    return "\n".join(lines)


def salad(rng: MaterialDraws, count: int) -> str:
    """Return drawn words with the marks of sentences."""
    drawn = []
    for _ in range(count):
        word = draw_code(rng) if rng.chance(0.03) else draw_word(rng)
        if rng.chance(0.12):
            word = word.capitalize()
        if rng.chance(0.15):
            word += rng.choice([",", ".", ".", ":", ";", "!", "?", " -", ")"])
        drawn.append(word)
    return " ".join(drawn)


def draw_code_block(rng: MaterialDraws) -> str:
    """Return a record in a code block, or the statements of a function."""
    language = rng.choice(agent_words("codes"))
    if rng.chance(0.5):
        body = json.dumps(draw_fields(rng, rng.randint(2, 8)), ensure_ascii=False, indent=2)
    else:
        name, value = rng.coined_word(), rng.choice(agent_words("prose"))
        lines = [f"def {name}({value}):"]
        for _ in range(rng.randint(1, 6)):
            left, right = rng.coined_word(), rng.choice(agent_words("prose"))
            lines.append(f"    {left} = {right}({value}, {rng.randint(0, 99)})")
        body = "\n".join(lines)
    return f"```{language}\n{body}\n```"


def wide_tool(rng: MaterialDraws) -> Tool:
    """Return a tool as agents define them, with a long description and many arguments."""
    verb, noun = rng.choice(agent_words("verbs")), rng.choice(agent_words("objects"))
    second = rng.choice(agent_words("prose")) if rng.chance(0.6) else rng.coined_word()
    parts = [verb, noun, second]
    separator = rng.choice(["_", "_", "-"])
    parameters = wide_schema(rng, depth=0)
    description = describe(rng, rng.randint(1, 6))
    name = separator.join(parts)
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def wide_schema(rng: MaterialDraws, depth: int) -> dict[str, Any]:
    """Return the schema of an object with up to six fields."""
    properties: dict[str, Any] = {}
    for _ in range(rng.randint(0 if depth == 0 else 1, 6 - 2 * depth)):
        key = rng.choice(agent_words("keys"))
        if rng.chance(0.4):
            key += f"_{rng.choice(agent_words('keys'))}"
        properties[key] = wide_argument(rng, depth)
    required = [key for key in properties if rng.chance(0.6)]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.chance(0.3):
        schema["additionalProperties"] = False
    return schema


def wide_argument(rng: MaterialDraws, depth: int) -> dict[str, Any]:
    kind = rng.choice(TYPES)
    if kind == "object" and depth < 2:
        return wide_schema(rng, depth + 1)
    schema: dict[str, Any] = {"type": "string" if kind in ("object", "enum") else kind}
    if rng.chance(0.7):
        schema["description"] = describe(rng, 1)
    if kind == "enum":
        schema["enum"] = [rng.choice(agent_words("prose")) for _ in range(rng.randint(2, 5))]
    if kind == "array":
        schema["items"] = {"type": rng.choice(["string", "integer"])}
    if rng.chance(0.15):
        schema["default"] = rng.choice(["", 0, 10, None, True])
    return schema


def describe(rng: MaterialDraws, count: int) -> str:
    """Return the sentences of a description."""
    sentences = []
    for _ in range(count):
        text = fill(rng, "rules") if rng.chance(0.5) else salad(rng, rng.randint(3, 14))
        sentences.append(text)
    return rng.choice([" ", "\n"]).join(sentences)


def dressed(rng: MaterialDraws, tool: Tool) -> Tool:
    """Return a tool in the form that one of the agent frameworks sends."""
    function = dict(tool["function"])
    parameters = dict(function["parameters"])
    kind = rng.random()
    if kind < 0.3:  # pydantic's titles
        properties = {}
        for key, schema in parameters["properties"].items():
            title = key.replace("_", " ").title()
            inner = dict(schema) | {"title": title}
            properties[key] = dict(sorted(inner.items())) if rng.chance(0.5) else inner
        parameters["properties"] = properties
        if rng.chance(0.5):
            parameters["title"] = f"{function['name']}_args"
    if kind < 0.7:
        order = (
            sorted(parameters) if rng.chance(0.5) else rng.sample(list(parameters), len(parameters))
        )
        parameters = {key: parameters[key] for key in order}
    if rng.chance(0.3):
        parameters["additionalProperties"] = False
    function["parameters"] = parameters
    if rng.chance(0.25):
        name = function["name"].replace("_", " ")
        function["description"] = rng.choice(
            [f"{name.capitalize()}.", f"{name} for the user", describe(rng, rng.randint(1, 3))]
        )
    if rng.chance(0.15):
        function["strict"] = rng.chance(0.5)
    return {"type": "function", "function": function}
