"""The tools of the demo model's second stage, the requests for them, and their results.

Names, descriptions and arguments are drawn, so that the model must read the definitions.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.offline.demo_training.chat import Message, dump
from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.text import Tool, casual, weather
from engine.offline.demo_training.topics import copied

FINAL_MARKS = "?.!"
JSON_TYPES = {"number": "integer", "decimal": "number", "switch": "boolean"}
STRING_VALUES = {"place", "person", "thing", "text", "day"}


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An argument of a tool, as tool_material.toml explains it."""

    keys: str
    values: str
    asked: bool = True


class ToolKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of tool, as tool_material.toml explains it."""

    weight: float
    names: list[str]
    descriptions: list[str]
    asks: list[str]
    result: str
    report: str
    arguments: dict[str, Argument]
    nouns: str = ""
    both: list[str] = []


class ToolMaterial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of tool_material.toml."""

    words: dict[str, str]
    tools: list[ToolKind]
    forms: dict[str, list[str]]


class DrawnArgument(NamedTuple):
    key: str
    values: str  # one of JSON_TYPES or STRING_VALUES; else the choices of an enum
    asked: bool


class DrawnTool(NamedTuple):
    """A tool with its drawn name, noun and arguments."""

    kind: ToolKind
    noun: str
    name: str
    arguments: dict[str, DrawnArgument]
    definition: Tool


class Value(NamedTuple):
    """A value as the arguments of a call have it, and as people write it."""

    json: Any
    spoken: str


class Errand(NamedTuple):
    """A call, its result and the sentence that reports it."""

    name: str
    arguments: dict[str, Any]
    result: str
    report: str


class Request(NamedTuple):
    """A question of the user, and the calls that answer it."""

    text: str
    errands: list[Errand]


@cache
def tool_material() -> ToolMaterial:
    """Read tool_material.toml. Raises msgspec.ValidationError if a field is missing or unknown."""
    path = Path(__file__).with_name("tool_material.toml")
    return msgspec.toml.decode(path.read_bytes(), type=ToolMaterial)


def draw_tools(rng: MaterialDraws, count: int) -> list[DrawnTool]:
    """Return tools with different names, of different kinds or about different nouns."""
    kinds = tool_material().tools
    weights = {index: kind.weight for index, kind in enumerate(kinds)}
    tools: dict[str, DrawnTool] = {}
    seen = set()
    while len(tools) < count:
        index = rng.weighted(weights)
        tool = draw_tool(rng, kinds[index])
        subject = (index, tool.noun if "{noun}" in tool.kind.report else "")
        if tool.name not in tools and subject not in seen:
            tools[tool.name] = tool
            seen.add(subject)
    return list(tools.values())


def draw_tool(rng: MaterialDraws, kind: ToolKind) -> DrawnTool:
    noun = draw_noun(rng, kind)
    arguments: dict[str, DrawnArgument] = {}
    keys: set[str] = set()
    for slot, argument in kind.arguments.items():
        if not argument.asked and rng.chance(0.7):
            continue
        choices = [key for key in argument.keys.split() if key not in keys]
        key = rng.choice(choices)
        if rng.chance(0.1):
            key = rng.coined_word()
        keys.add(key)
        arguments[slot] = DrawnArgument(key, draw_values(rng, argument), argument.asked)
    name = rng.choice(kind.names).format(noun=noun)
    description = rng.choice(kind.descriptions).format(noun=noun)
    if description and rng.chance(0.15):
        description += "."
    definition = define(rng, name, description, arguments)
    return DrawnTool(kind, noun, name, arguments, definition)


def draw_noun(rng: MaterialDraws, kind: ToolKind) -> str:
    """Return a noun of one of the kind's lists, or an invented one."""
    if rng.chance(0.25):
        return rng.coined_word()
    if not kind.nouns:
        return rng.word("spelled")
    chosen = rng.choice(kind.nouns.split())
    if chosen == "measures":
        return rng.choice(tool_material().words["measures"].split())
    return rng.word(chosen)


def draw_values(rng: MaterialDraws, argument: Argument) -> str:
    """Return what an argument is: a kind of value, or the choices of an enum."""
    values = argument.values.split()
    if values[0] in JSON_TYPES or values[0] in STRING_VALUES:
        return rng.choice(values)
    if argument.asked:
        rng.shuffle(values)
    return " ".join(values)


def define(
    rng: MaterialDraws, name: str, description: str, arguments: dict[str, DrawnArgument]
) -> Tool:
    """Return the definition of a tool as OpenAI's API has it."""
    properties: dict[str, Any] = {}
    required = []
    for argument in arguments.values():
        properties[argument.key] = define_argument(rng, argument)
        if argument.asked:
            required.append(argument.key)
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.chance(0.15):
        parameters["additionalProperties"] = False
    if rng.chance(0.1):
        del parameters["required"]
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters
    if rng.chance(0.15):
        function["strict"] = True
    return {"type": "function", "function": function}


def define_argument(rng: MaterialDraws, argument: DrawnArgument) -> dict[str, Any]:
    """Return the JSON schema of an argument."""
    schema: dict[str, Any] = {"type": JSON_TYPES.get(argument.values, "string")}
    if argument.values not in JSON_TYPES and argument.values not in STRING_VALUES:
        schema["enum"] = argument.values.split()
    if argument.values == "place" and rng.chance(0.25):
        schema["description"] = rng.form("place description")
    elif rng.chance(0.12):
        schema["description"] = f"The {argument.key}"
    if rng.chance(0.1):
        schema["title"] = argument.key.replace("_", " ").title()
    return schema


def draw_value(rng: MaterialDraws, values: str) -> Value:
    """Return a value of an argument. Strings are often invented, so that they must be copied."""
    if values == "number":
        number = rng.randint(0, 10 ** rng.randint(1, 4))
        return Value(number, str(number))
    if values == "decimal":
        decimal = rng.randint(1, 999) / 10
        return Value(decimal, str(decimal))
    if values == "switch":
        is_on = rng.chance(0.5)
        return Value(is_on, "on" if is_on else "off")
    text = draw_text(rng, values)
    return Value(text, text)


def draw_text(rng: MaterialDraws, values: str) -> str:
    if values in ("place", "person") and rng.chance(0.5):
        return rng.coined_name()
    match values:
        case "place":
            return rng.city()
        case "person":
            return rng.person()
        case "day":
            return rng.word("days")
        case "thing":
            return draw_thing(rng)
        case "text":
            form = rng.choice(tool_material().forms["messages"])
            day = rng.word("days")
            noun = rng.word("spelled")
            return form.format(day=day, noun=noun, place=rng.city(), person=rng.person())
    return rng.choice(values.split())


def draw_thing(rng: MaterialDraws) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.coined_name()
    if kind < 0.5:
        return rng.coined_name().lower() + str(rng.randint(0, 99))
    return rng.choice(copied())


def draw_request(rng: MaterialDraws, tools: list[DrawnTool], both_share: float) -> Request:
    """Return a request for one call or, in a share of `both_share`, for two calls."""
    tool = rng.choice(tools)
    if not rng.chance(both_share):
        return single_request(rng, tool)
    if tool.kind.both and (len(tools) == 1 or rng.chance(0.5)):
        return twice_requested(rng, tool)
    others = [other for other in tools if other is not tool] or tools
    first = single_request(rng, tool)
    second = single_request(rng, rng.choice(others))
    text = rng.choice(tool_material().forms["joins"]).format(
        first=first.text,
        first_open=first.text.rstrip(FINAL_MARKS),
        second=second.text,
        second_low=second.text[0].lower() + second.text[1:],
    )
    return Request(text, first.errands + second.errands)


def single_request(rng: MaterialDraws, tool: DrawnTool) -> Request:
    values = draw_arguments(rng, tool)
    spoken = {slot: value.spoken for slot, value in values.items()}
    text = rng.choice(tool.kind.asks).format(noun=tool.noun, **spoken)
    return Request(text, [errand_of(rng, tool, values)])


def twice_requested(rng: MaterialDraws, tool: DrawnTool) -> Request:
    """Return a request for two calls of a tool with one argument."""
    first = draw_arguments(rng, tool)
    second = draw_arguments(rng, tool)
    form = rng.choice(tool.kind.both)
    text = form.format(noun=tool.noun, a=first["a"].spoken, a2=second["a"].spoken)
    return Request(text, [errand_of(rng, tool, first), errand_of(rng, tool, second)])


def draw_arguments(rng: MaterialDraws, tool: DrawnTool) -> dict[str, Value]:
    values = {}
    for slot, argument in tool.arguments.items():
        if argument.asked:
            values[slot] = draw_value(rng, argument.values)
    return values


def errand_of(rng: MaterialDraws, tool: DrawnTool, values: dict[str, Value]) -> Errand:
    arguments = {tool.arguments[slot].key: value.json for slot, value in values.items()}
    if tool.kind.result == "weather":
        key = tool.arguments["a"].key
        found = weather(rng, key, values["a"].spoken)
        return Errand(tool.name, arguments, found.content, found.sentence)
    result, spoken = draw_result(rng, tool, arguments)
    named = {slot: value.spoken for slot, value in values.items()}
    report = tool.kind.report.format(noun=tool.noun, result=spoken, **named)
    return Errand(tool.name, arguments, result, report)


def draw_result(rng: MaterialDraws, tool: DrawnTool, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return the result of a call, and the part of it that the report quotes."""
    if tool.kind.result == "done":
        return rng.choice(tool_material().forms["done"]), ""
    value = result_value(rng, tool.kind.result)
    if rng.chance(0.3):
        return value.spoken, value.spoken
    record = dict(arguments) if rng.chance(0.4) else {}
    key = rng.choice(["result", "value", "answer"])
    if "{noun}" in tool.kind.report and rng.chance(0.5):
        key = tool.noun
    if tool.kind.result == "clock":
        key = rng.choice(["time", "time", "local_time", "clock"])
    record[key] = value.json
    return dump(record), value.spoken


def result_value(rng: MaterialDraws, result: str) -> Value:
    if result == "clock":
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        return Value(clock, clock)
    kind = rng.random()
    if result == "number" or kind < 0.5:
        return draw_value(rng, rng.choice(["number", "number", "decimal"]))
    if kind < 0.7:
        return draw_value(rng, "thing")
    return draw_value(rng, rng.choice(["person", "place", "red blue green yellow black white"]))


def request_message(rng: MaterialDraws, request: Request) -> Message:
    """Return the user's message. It keeps its capitals, which the arguments may need."""
    text = casual(rng, request.text) if rng.chance(0.3) else request.text
    spoken = [str(value) for errand in request.errands for value in errand.arguments.values()]
    is_copyable = all(value in text for value in spoken if value not in ("True", "False"))
    return {"role": "user", "content": text if is_copyable else request.text}


def call_messages(errands: list[Errand]) -> list[Message]:
    """Return the message with the calls, and one with the result of each."""
    calls = []
    for errand in errands:
        function = {"name": errand.name, "arguments": errand.arguments}
        calls.append({"type": "function", "function": function})
    messages: list[Message] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    for errand in errands:
        messages.append({"role": "tool", "content": errand.result})
    return messages


def report_message(errands: list[Errand]) -> Message:
    report = " ".join(errand.report for errand in errands)
    return {"role": "assistant", "content": report}
