"""The training text of the demo model: an endless, seeded stream of conversations.

Questions of probes.jsonl never occur in it. A drawn conversation is dropped if it contains the
question of a single-turn probe or begins with all of a longer probe, in any spelling or spacing.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any, NamedTuple

from engine.offline.demo_training.chat import Message, dump
from engine.offline.demo_training.material import MaterialDraws, Question, words
from engine.offline.demo_training.topics import TOPICS, rehearsal

# Styles of the answers and kinds of personal facts, with their relative weights.
STYLES = {
    "": 70,
    "plain": 12,
    "brief": 10,
    "pirate": 5,
    "named": 3,
}
PERSONAL = {
    "names": 4,
    "colours": 2,
    "foods": 1,
    "cities": 1,
    "pets": 1,
}
FINAL_MARKS = "?.!"

Tool = dict[str, Any]


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[Tool]
    effort: str = "none"  # of the thoughts: none, low, medium or high
    is_held: bool = False  # whether a grammar holds the answer, which is JSON


class PersonalFact(NamedTuple):
    """An exchange that states a fact about the user, and one that asks for it."""

    statement: list[Message]  # empty if the fact is never stated
    question: list[Message]


class ToolResult(NamedTuple):
    content: str
    sentence: str  # of the assistant, which reports the result


def plain(message: Message) -> str:
    """Return the text of a message for comparisons: lower case, words and arithmetic signs only."""
    content = str(message.get("content") or "")
    found = re.findall(r"\w+|[+*<>=-]", content.lower())
    return " ".join(found)


def plain_starts(messages: list[Message]) -> list[str]:
    """Return the plain text of the conversation up to each of its messages."""
    starts: list[str] = []
    for message in messages:
        text = plain(message)
        if starts:
            text = f"{starts[-1]} | {text}"
        starts.append(text)
    return starts


def is_talk(probe: dict[str, Any]) -> bool:
    """Whether earlier turns matter, so that the whole conversation is the question."""
    roles = {message["role"] for message in probe["messages"]}
    return "assistant" in roles or "tool" in roles


def held_out_of(probes: list[dict[str, Any]]) -> frozenset[str]:
    """Return the plain questions, and plain whole conversations, that must not be drawn."""
    held_out = set()
    for probe in probes:
        messages = probe["messages"]
        question = messages if is_talk(probe) else messages[-1:]
        held_out.add(plain_starts(question)[-1])
    return frozenset(held_out)


def exchange(rng: MaterialDraws, question: Question) -> list[Message]:
    """Return the messages of a question and its answer."""
    text = question.text
    if question.foldable:
        text = casual(rng, text)
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": question.answer},
    ]


def casual(rng: MaterialDraws, text: str) -> str:
    """Vary the capitals, the apostrophes, the final mark and a "please" of a question."""
    if rng.chance(0.2):
        text = text.rstrip(FINAL_MARKS)
    if rng.chance(0.04):
        text = text.rstrip(FINAL_MARKS)
        mark = rng.choice(["", "?", "."])
        text = f"{text}, please{mark}"
    elif rng.chance(0.06):
        opening = rng.choice(["Please: ", "Hi! ", "Hey, ", "Please ", "Ok, "])
        text = opening + text
    if rng.chance(0.1):
        text = text.replace("'s ", "s ")
    if rng.chance(0.15):
        text = text.lower()
    return text


def topic_exchange(rng: MaterialDraws, style: str) -> list[Message]:
    """Return a question on any topic and its answer in the given style."""
    if not style and rng.chance(0.02):
        question = rng.question("get_weather", rng.city())
        return exchange(rng, question)
    topic = rng.weighted(TOPICS)
    question = topic(rng)
    asked, answered = exchange(rng, question)
    if style == "brief" and question.brief:
        answered["content"] = question.brief
    elif style == "pirate" and not question.answer.startswith("{"):
        answered["content"] = f"Arr! {question.answer}"
    elif not style and wishes_brief(rng, question):
        wish = rng.form("brief wish")
        asked["content"] += f" {wish}"
        answered["content"] = question.brief
    return [asked, answered]


def wishes_brief(rng: MaterialDraws, question: Question) -> bool:
    """Whether the user adds the wish for a brief answer, if the question has one."""
    if not question.brief or not question.foldable:
        return False
    return rng.chance(0.04)


def personal_fact(rng: MaterialDraws, kind: str) -> PersonalFact:
    """Return a personal fact. Its statement and its question may be far apart."""
    value = personal_value(rng, kind)
    is_known = kind != "names" or value in words("names")
    statement = rng.question(f"tell {kind}", value)
    stated = exchange(rng, statement._replace(foldable=is_known))
    if rng.chance(0.08):
        text = rng.form(f"recall {kind}")
        question = Question(text, "You have not told me yet.")
        return PersonalFact([], exchange(rng, question))
    question = rng.question(f"recall {kind}", value)
    return PersonalFact(stated, exchange(rng, question))


def personal_value(rng: MaterialDraws, kind: str) -> str:
    if kind == "names":
        return rng.person()
    if kind == "cities":
        return rng.city()
    return rng.word(kind)


def place_tool(rng: MaterialDraws, name: str) -> Tool:
    """Return a tool with a place as its only argument and one of several descriptions."""
    description = rng.form(f"{name} description")
    parameters = place_parameters(rng, name)
    function = {"name": name, "description": description, "parameters": parameters}
    tool = {"type": "function", "function": function}
    if rng.chance(0.15):
        return json.loads(json.dumps(tool, sort_keys=True))
    return tool


def place_parameters(rng: MaterialDraws, name: str) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    key = rng.choice(["city", "city", "location"])
    place = {"type": "string"}
    description = rng.form("place description")
    if description:
        place["description"] = description
    properties: dict[str, Any] = {key: place}
    if name == "get_weather" and rng.chance(0.15):
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": [key],
    }
    if rng.chance(0.2):
        parameters["additionalProperties"] = False
    return parameters


def tool_result(rng: MaterialDraws, name: str, key: str, place: str) -> ToolResult:
    """Return the result of a tool call. `key` is the name of the argument with the place."""
    if name == "get_weather":
        return weather(rng, key, place)
    hour = rng.randint(0, 23)
    minute = rng.randint(0, 59)
    clock = f"{hour:02}:{minute:02}"
    content = dump({key: place, "time": clock})
    return ToolResult(content, f"It is {clock} in {place}.")


def weather(rng: MaterialDraws, key: str, place: str) -> ToolResult:
    degrees = rng.randint(-15, 38)
    sky = rng.word("skies")
    degrees_key = rng.choice(["temperature", "temperature_c", "temp"])
    sky_key = rng.choice(["condition", "weather", "sky"])
    record: dict[str, str | int] = {}
    if rng.chance(0.7):
        record[key] = place
    record[degrees_key] = degrees
    record[sky_key] = sky
    sentence = f"It is {degrees} °C and {sky} in {place}."
    if rng.chance(0.75):
        return ToolResult(dump(record), sentence)
    content = rng.form("weather result", degrees, sky)
    return ToolResult(content, sentence)


def tool_exchange(rng: MaterialDraws, tools: list[Tool]) -> list[Message]:
    """Return a question, the call that answers it and, more often than not, the result."""
    function = rng.choice(tools)["function"]
    name = function["name"]
    key = next(iter(function["parameters"]["properties"]))
    is_known = rng.chance(0.75)
    place = rng.city() if is_known else rng.invented_name()
    text = rng.form(name, place)
    question = Question(text, "", foldable=is_known)
    asked, called = exchange(rng, question)
    call = {"name": name, "arguments": {key: place}}
    called["tool_calls"] = [{"type": "function", "function": call}]
    messages = [asked, called]
    if rng.chance(0.75):
        result = tool_result(rng, name, key, place)
        messages.append({"role": "tool", "content": result.content})
        messages.append({"role": "assistant", "content": result.sentence})
    return messages


class Author:
    """Draws conversations from one seed and drops those that contain `held_out` text."""

    def __init__(self, seed: int, held_out: frozenset[str]) -> None:
        self.rng = MaterialDraws(seed)
        self.held_out = held_out

    def compose(self, progress: float) -> Conversation:
        """Return the next conversation; `progress` is the completed share of training, 0 to 1.

        Rehearsals come first and alone: every topic copies words of its question, so it is learned
        fast after copying. In the last third, 3 % of the conversations have about 800 tokens. They
        make up a fifth of all tokens.
        """
        decreasing = min(1.0, (0.22 - progress) / 0.1)
        rehearsal_share = max(0.03, decreasing)
        long_share = 0.03 if progress > 2 / 3 else 0.0
        while True:
            conversation = self.draft(rehearsal_share, long_share)
            if not self.is_held_out(conversation):
                return conversation

    def draft(self, rehearsal_share: float, long_share: float) -> Conversation:
        """Return a conversation that may contain held-out text."""
        if self.rng.chance(rehearsal_share):
            question = rehearsal(self.rng)
            return Conversation(exchange(self.rng, question), [])
        if self.rng.chance(0.08):
            return self.with_tools()
        return self.talk(long_share)

    def is_held_out(self, conversation: Conversation) -> bool:
        messages = conversation.messages
        questions = {plain(message) for message in messages if message["role"] == "user"}
        starts = plain_starts(messages)
        return not self.held_out.isdisjoint(questions.union(starts))

    def talk(self, long_share: float) -> Conversation:
        """Return a conversation in one style. A share of `long_share` is long."""
        style = self.rng.weighted(STYLES)
        count = self.exchange_count(long_share)
        exchanges = [topic_exchange(self.rng, style) for _ in range(count)]
        if count > 1 and self.rng.chance(0.5):
            self.weave_facts(exchanges)
        if style:
            exchanges = self.opening(style) + exchanges
        messages = list(chain.from_iterable(exchanges))
        return Conversation(messages, [])

    def exchange_count(self, long_share: float) -> int:
        count = 1 if self.rng.chance(0.55) else self.rng.randint(2, 5)
        if self.rng.chance(long_share):
            return self.rng.randint(16, 32)
        return count

    def weave_facts(self, exchanges: list[list[Message]]) -> None:
        """Insert personal facts among the exchanges, and the questions about them later."""
        rng = self.rng
        count = 1 + len(exchanges) // 4
        drawn = {rng.weighted(PERSONAL) for _ in range(count)}
        kinds = [kind for kind in PERSONAL if kind in drawn]
        facts = [personal_fact(rng, kind) for kind in kinds]
        for fact in facts:
            later = rng.randint(0, len(exchanges))
            exchanges.insert(later, fact.question)
            if fact.statement:
                first = rng.randint(0, later)
                second = rng.randint(0, later)
                exchanges.insert(min(first, second), fact.statement)

    def opening(self, style: str) -> list[list[Message]]:
        """Return the system message of a style and, if that gives a name, a question about it."""
        rng = self.rng
        name = rng.person() if style == "named" else ""
        text = rng.form(f"{style} system", name)
        exchanges = [[{"role": "system", "content": text}]]
        if name and rng.chance(0.8):
            question = rng.question("own name", name)
            exchanges.append(exchange(rng, question))
        return exchanges

    def with_tools(self) -> Conversation:
        """Return a conversation with tools. An unanswered tool call ends it."""
        tools = self.tools()
        messages: list[Message] = []
        if self.rng.chance(0.3):
            text = self.rng.form("plain system")
            messages.append({"role": "system", "content": text})
        count = self.rng.choice([1, 1, 1, 2, 3])
        for _ in range(count):
            if self.rng.chance(0.75):
                messages += tool_exchange(self.rng, tools)
            else:
                messages += topic_exchange(self.rng, "tools")
            if messages[-1].get("tool_calls"):
                break
        return Conversation(messages, tools)

    def tools(self) -> list[Tool]:
        weather_tool = place_tool(self.rng, "get_weather")
        if self.rng.chance(0.7):
            return [weather_tool]
        time_tool = place_tool(self.rng, "get_time")
        return self.rng.sample([weather_tool, time_tool], 2)
