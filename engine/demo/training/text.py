"""The training text of the demo model: an endless, seeded stream of conversations.

Questions of probes.jsonl never occur in it. A drawn conversation is dropped if it contains the
question of a single-turn probe or begins with all of a longer probe, in any spelling or spacing.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate, chain
from typing import Any, NamedTuple

from engine.demo.training.chat import Message, dump
from engine.demo.training.topics import TOPICS, Ask, Draws, words

STYLES = {"": 70, "plain": 12, "brief": 10, "pirate": 5, "named": 3}
PERSONAL = {"names": 4, "colours": 2, "foods": 1, "cities": 1, "pets": 1}


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[dict[str, Any]]


def plain(message: Message) -> str:
    """Return the text of a message for comparisons: lower case, words and arithmetic signs only."""
    return " ".join(re.findall(r"\w+|[+*<>=-]", str(message.get("content") or "").lower()))


def plain_starts(messages: list[Message]) -> list[str]:
    """Return the plain text of the conversation up to each of its messages."""
    return list(accumulate(map(plain, messages), "{} | {}".format))


def is_talk(probe: dict[str, Any]) -> bool:
    """Whether earlier turns matter, so that the whole conversation is the question."""
    return any(message["role"] in ("assistant", "tool") for message in probe["messages"])


def held_out_of(probes: list[dict[str, Any]]) -> frozenset[str]:
    """Return the plain questions, and plain whole conversations, that must not be drawn."""
    asked = (p["messages"] if is_talk(p) else p["messages"][-1:] for p in probes)
    return frozenset(plain_starts(messages)[-1] for messages in asked)


def turn(rng: Draws, ask: Ask) -> list[Message]:
    """Return a question and its answer. Capitals, the final mark and a "please" vary."""
    text = ask.question
    if ask.fold:
        if rng.random() < 0.2:
            text = text.rstrip("?.!")
        if rng.random() < 0.04:
            text = f"{text.rstrip('?.!')}, please{rng.choice(['', '?', '.'])}"
        elif rng.random() < 0.06:
            text = rng.choice(["Please: ", "Hi! ", "Hey, ", "Please ", "Ok, "]) + text
        if rng.random() < 0.1:
            text = text.replace("'s ", "s ")
        text = text.lower() if rng.random() < 0.15 else text
    return [{"role": "user", "content": text}, {"role": "assistant", "content": ask.answer}]


def memory(rng: Draws, item: str) -> tuple[list[Message], list[Message]]:
    """Return two exchanges: one states a personal fact, one asks for it. They may be far apart."""
    draw = {"names": rng.person, "cities": rng.city}.get(item)
    value = draw() if draw else rng.word(item)
    fold = item != "names" or value in words("names")
    told = turn(rng, rng.said(f"tell {item}", value)._replace(fold=fold))
    if rng.random() < 0.08:
        return [], turn(rng, Ask(rng.form(f"recall {item}"), "You have not told me yet."))
    return told, turn(rng, rng.said(f"recall {item}", value))


def place_tool(rng: Draws, name: str) -> dict[str, Any]:
    """Return a tool with a place as its only argument and one of several descriptions."""
    about, key = rng.form(f"{name} description"), rng.choice(["city", "city", "location"])
    described = rng.form("place description")
    argument = {"type": "string", **({"description": described} if described else {})}
    properties: dict[str, Any] = {key: argument}
    if name == "get_weather" and rng.random() < 0.15:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": [key]}
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    tool = {"name": name, "description": about, "parameters": parameters}
    tool = {"type": "function", "function": tool}
    return json.loads(json.dumps(tool, sort_keys=True)) if rng.random() < 0.15 else tool


def tool_result(rng: Draws, name: str, key: str, place: str) -> tuple[str, str]:
    """Return the result of a tool call, and the sentence that reports it."""
    if name == "get_time":
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        return dump({key: place, "time": clock}), f"It is {clock} in {place}."
    degrees, sky = rng.randint(-15, 38), rng.word("skies")
    unit = rng.choice(["temperature", "temperature_c", "temp"])
    record = {unit: degrees, rng.choice(["condition", "weather", "sky"]): sky}
    if rng.random() < 0.7:
        record = {key: place, **record}
    text = dump(record) if rng.random() < 0.75 else rng.form("weather result", degrees, sky)
    return text, f"It is {degrees} °C and {sky} in {place}."


def tool_turn(rng: Draws, tools: list[dict[str, Any]]) -> list[Message]:
    function = rng.choice(tools)["function"]
    name, key = function["name"], next(iter(function["parameters"]["properties"]))
    known = rng.random() < 0.75
    place = rng.city() if known else rng.invented_name()
    asked, called = turn(rng, Ask(rng.form(name, place), "", fold=known))
    call = {"type": "function", "function": {"name": name, "arguments": {key: place}}}
    messages = [asked, {**called, "tool_calls": [call]}]
    if rng.random() < 0.75:
        text, sentence = tool_result(rng, name, key, place)
        messages += [{"role": "tool", "content": text}, {"role": "assistant", "content": sentence}]
    return messages


def exchange(rng: Draws, style: str) -> list[Message]:
    """Return a question on any topic and its answer in the given style."""
    if not style and rng.random() < 0.02:
        return turn(rng, rng.said("get_weather", rng.city()))
    ask = rng.choices(list(TOPICS), list(TOPICS.values()))[0](rng)
    asked, answered = turn(rng, ask)
    if style == "brief" and ask.brief:
        answered["content"] = ask.brief
    elif style == "pirate" and not ask.answer.startswith("{"):
        answered["content"] = f"Arr! {ask.answer}"
    elif not style and ask.brief and ask.fold and rng.random() < 0.04:
        asked["content"] += f" {rng.form('brief wish')}"
        answered["content"] = ask.brief
    return [asked, answered]


class Author:
    """Draws conversations from one seed and drops those that contain `held_out` text."""

    def __init__(self, seed: int, held_out: frozenset[str]) -> None:
        self.rng = Draws(seed)
        self.held_out = held_out

    def compose(self, progress: float) -> Conversation:
        """Return the next conversation; `progress` is the completed share of training, 0 to 1.

        Rehearsals come first and alone: every topic copies words of its question, so it is learned
        fast after copying. In the last third, 3 % of the conversations have about 800 tokens. They
        make up a fifth of all tokens.
        """
        share = min(1.0, max(0.03, (0.22 - progress) / 0.1))
        while True:
            if self.rng.random() < share:
                drawn = Conversation(turn(self.rng, self.rng.rehearsal()), [])
            elif self.rng.random() < 0.08:
                drawn = self.with_tools()
            else:
                drawn = self.talk(0.03 if progress > 2 / 3 else 0.0)
            asked = {plain(m) for m in drawn.messages if m["role"] == "user"}
            if self.held_out.isdisjoint(asked | set(plain_starts(drawn.messages))):
                return drawn

    def talk(self, long_share: float) -> Conversation:
        rng = self.rng
        style = rng.choices(list(STYLES), list(STYLES.values()))[0]
        turns = 1 if rng.random() < 0.55 else rng.randint(2, 5)
        if rng.random() < long_share:
            turns = rng.randint(16, 32)
        exchanges = [exchange(rng, style) for _ in range(turns)]
        if turns > 1 and rng.random() < 0.5:
            self.weave_memory(exchanges)
        if style:
            name = rng.person() if style == "named" else ""
            system = {"role": "system", "content": rng.form(f"{style} system", name)}
            if name and rng.random() < 0.8:
                exchanges.insert(0, turn(rng, rng.said("own name", name)))
            exchanges.insert(0, [system])
        return Conversation(list(chain.from_iterable(exchanges)), [])

    def weave_memory(self, exchanges: list[list[Message]]) -> None:
        """Insert personal facts among the exchanges, and the questions about them later."""
        rng, items = self.rng, list(PERSONAL)
        count = 1 + len(exchanges) // 4
        drawn = {rng.choices(items, list(PERSONAL.values()))[0] for _ in range(count)}
        for told, asked in [memory(rng, item) for item in sorted(drawn, key=items.index)]:
            later = rng.randint(0, len(exchanges))
            exchanges.insert(later, asked)
            if told:
                exchanges.insert(min(rng.randint(0, later), rng.randint(0, later)), told)

    def with_tools(self) -> Conversation:
        rng = self.rng
        messages: list[Message] = []
        tools = [place_tool(rng, "get_weather")]
        if rng.random() >= 0.7:
            tools = rng.sample([*tools, place_tool(rng, "get_time")], 2)
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.form("plain system")})
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            messages += tool_turn(rng, tools) if rng.random() < 0.75 else exchange(rng, "tools")
            if messages[-1].get("tool_calls"):
                break
        return Conversation(messages, tools)
