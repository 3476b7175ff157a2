"""The training text of the demo model: an endless, seeded stream of conversations.

A conversation is a list of messages and the tools that were offered. Questions of probes.jsonl
never come out: a single-turn probe's question is dropped wherever it is drawn, a longer probe's
whole conversation likewise, however they are spelled, spaced or punctuated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from engine.demo import facts
from engine.demo.chat import Message, dump
from engine.demo.phrases import BRIEF_SYSTEMS, BRIEF_WISHES, PIRATE_SYSTEMS, PLAIN_SYSTEMS, forms
from engine.demo.topics import TOPICS, Ask, form, invented_name, person, rehearsal

LONG_SHARE = 0.03  # of the conversations; they hold a fifth of the tokens


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class HeldOut:
    """What must not be drawn: plain questions, and plain whole conversations."""

    questions: frozenset[str]
    conversations: frozenset[str]


def plain(text: str) -> str:
    """The form in which questions are compared: lower case, words and arithmetic signs only."""
    return " ".join(re.findall(r"\w+|[+*<>=-]", text.lower()))


def plain_conversation(messages: list[Message]) -> str:
    return " | ".join(plain(str(message.get("content") or "")) for message in messages)


def is_talk(probe: dict[str, Any]) -> bool:
    """Whether earlier turns matter, so that the whole conversation is the question."""
    return any(message["role"] in ("assistant", "tool") for message in probe["messages"])


def held_out_of(probes: list[dict[str, Any]]) -> HeldOut:
    """Probes with earlier turns are held out whole, the others by their question."""
    questions, conversations = set(), set()
    for probe in probes:
        messages = probe["messages"]
        if is_talk(probe):
            conversations.add(plain_conversation(messages))
        else:
            questions.add(plain(messages[-1]["content"]))
    return HeldOut(frozenset(questions), frozenset(conversations))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def scuff(rng: Random, text: str, fold: bool) -> str:
    """A question as people type it: without capitals, without its last mark, or with a please."""
    if not fold:
        return text
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    if rng.random() < 0.04:
        text = f"{text.rstrip('?.!')}, please{rng.choice(['', '?', '.'])}"
    elif rng.random() < 0.06:
        text = rng.choice(["Please: ", "Hi! ", "Hey, ", "Please ", "Ok, "]) + text
    if rng.random() < 0.1:
        text = text.replace("'s ", "s ")
    return text.lower() if rng.random() < 0.15 else text


def capital_city(rng: Random) -> str:
    return rng.choice(list(facts.CAPITALS.values()))


# What a user may tell about themselves: statement, question, and the answer's form.
PERSONAL = (
    (forms("""My name is {}. | I am {}. | Hi, I am {}. | Hello, my name is {}! | Call me {}.
        | I'm {}"""),
     forms("""What is my name? | What's my name? | Do you remember my name? | Who am I?
        | Can you tell me my name?"""),
     "Your name is {}.", "Nice to meet you, {}!", person),
    (forms("""My favourite colour is {}. | I like the colour {} best.
        | My favorite color is {}."""),
     forms("""What is my favourite colour? | Which colour do I like best?
        | Do you remember my favourite colour? | What is my favorite color?"""),
     "Your favourite colour is {}.", "I will remember {}.", lambda rng: rng.choice(facts.COLOURS)),
    (forms("My favourite food is {}. | I love to eat {}. | I like {} best of all food."),
     forms("""What is my favourite food? | What do I love to eat?
        | Do you remember my favourite food?"""),
     "Your favourite food is {}.", "I will remember {}.", lambda rng: rng.choice(facts.FOODS)),
    (forms("I live in {}. | My home is in {}. | I come from {}."),
     forms("Where do I live? | In which city do I live? | Do you remember where I live?"),
     "You live in {}.", "I will remember {}.", capital_city),
    (forms("I have a {}. | I have a pet {}. | My pet is a {}."),
     forms("Which pet do I have? | What pet do I have? | Do you remember my pet?"),
     "You have a {}.", "I will remember your {}.", lambda rng: rng.choice(facts.PETS)),
)  # fmt: skip


def memory_turns(rng: Random, kind: int) -> tuple[list[Message], list[Message]]:
    """Two exchanges: one tells a personal fact, one asks for it. They may stand far apart."""
    tells, asks, recall, reply, draw = PERSONAL[kind]
    value = draw(rng)
    told = scuff(rng, rng.choice(tells).format(value), value in facts.NAMES or draw is not person)
    known = recall.format(value)
    if rng.random() < 0.08:
        return [], [
            user(scuff(rng, rng.choice(asks), True)),
            assistant("You have not told me yet."),
        ]
    first = [user(told), assistant(reply.format(value))]
    return first, [user(scuff(rng, rng.choice(asks), True)), assistant(known)]


def place_tool(rng: Random, name: str, about: str) -> dict[str, Any]:
    """A tool with one place as its argument, described in one of the ways people describe it."""
    key = rng.choice(["city", "city", "location"])
    described = rng.choice(
        ["", "Name of the city", "The city", "City name", "City and country, e.g. Paris, France"]
    )
    argument = {"type": "string", "description": described} if described else {"type": "string"}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {key: argument},
        "required": [key],
    }
    if name == "get_weather" and rng.random() < 0.15:
        units = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        parameters["properties"] = {key: argument, "unit": units}
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function = {"name": name, "description": about, "parameters": parameters}
    tool = {"type": "function", "function": function}
    return json.loads(json.dumps(tool, sort_keys=True)) if rng.random() < 0.15 else tool


def offered_tools(rng: Random) -> list[dict[str, Any]]:
    about = ["Get the weather in a city", "Get the current weather", "Current weather of a city"]
    about += [
        "Get current temperature for a given location.",
        "Get the current weather in a given location",
    ]
    weather = place_tool(rng, "get_weather", rng.choice(about))
    if rng.random() < 0.7:
        return [weather]
    both = [
        weather,
        place_tool(rng, "get_time", rng.choice(["Get the local time", "Current time in a city"])),
    ]
    return rng.sample(both, 2)


def tool_result(rng: Random, name: str, key: str, place: str) -> tuple[str, str]:
    """What a tool gives back, and the sentence that says it."""
    if name == "get_time":
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        return dump({key: place, "time": clock}), f"It is {clock} in {place}."
    degrees, sky = rng.randint(-15, 38), rng.choice(facts.WEATHER)
    unit, sky_key = (
        rng.choice(["temperature", "temperature_c", "temp"]),
        rng.choice(["condition", "weather", "sky"]),
    )
    record: dict[str, Any] = {unit: degrees, sky_key: sky}
    if rng.random() < 0.7:
        record = {key: place, **record}
    text = (
        dump(record)
        if rng.random() < 0.75
        else rng.choice([f"{degrees} C, {sky}", f"{degrees}°C and {sky}"])
    )
    return text, f"It is {degrees} °C and {sky} in {place}."


def tool_turn(rng: Random, tools: list[dict[str, Any]]) -> list[Message]:
    function = rng.choice(tools)["function"]
    name, key = function["name"], next(iter(function["parameters"]["properties"]))
    known = rng.random() < 0.75
    place = capital_city(rng) if known else invented_name(rng)
    question = form(rng, name, place)
    call = {"type": "function", "function": {"name": name, "arguments": {key: place}}}
    messages = [
        user(scuff(rng, question, known)),
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if rng.random() < 0.75:
        text, sentence = tool_result(rng, name, key, place)
        messages += [{"role": "tool", "content": text}, assistant(sentence)]
    return messages


def toolless_weather(rng: Random) -> list[Message]:
    place = capital_city(rng)
    question = form(rng, "get_weather", place)
    return [
        user(scuff(rng, question, True)),
        assistant("I cannot see the weather: no weather tool was given to me."),
    ]


class Author:
    """Draws conversations from one seed; `held_out` is dropped wherever it would appear."""

    def __init__(self, seed: int, held_out: HeldOut) -> None:
        self.rng = Random(seed)
        self.held_out = held_out
        self.makers = [maker for maker, _ in TOPICS.values()]
        self.weights = [weight for _, weight in TOPICS.values()]

    def conversations(self, progress: float = 0.5) -> Iterator[Conversation]:
        """Endless, as `compose` draws them at one moment of the training."""
        while True:
            yield self.compose(progress)

    def compose(self, progress: float) -> Conversation:
        """The next conversation when `progress` (0 to 1) of the training is done.

        Rehearsals come first and alone: every topic copies words of its question, and is learned
        fast once copying is; in the last third some conversations run on for 800 tokens.
        """
        share = min(1.0, max(0.03, (0.22 - progress) / 0.1))
        while True:
            if self.rng.random() < share:
                ask = rehearsal(self.rng)
                drawn = Conversation([user(ask.question), assistant(ask.answer)], [])
            else:
                drawn = self.draw(LONG_SHARE if progress > 2 / 3 else 0.0)
            if self.allowed(drawn.messages):
                return drawn

    def allowed(self, messages: list[Message]) -> bool:
        if any(
            m["role"] == "user" and plain(m["content"]) in self.held_out.questions for m in messages
        ):
            return False
        if len(messages) <= 2:
            return True
        seen: list[str] = []
        for message in messages:
            seen.append(plain(str(message.get("content") or "")))
            if " | ".join(seen) in self.held_out.conversations:
                return False
        return True

    def draw(self, long_share: float) -> Conversation:
        rng = self.rng
        kind = rng.random()
        if kind < 0.08:
            return self.with_tools()
        style = rng.choices(["", "plain", "brief", "pirate", "named"], [70, 12, 10, 5, 3])[0]
        turns = 1 if rng.random() < 0.55 else rng.randint(2, 5)
        if rng.random() < long_share:
            turns = rng.randint(16, 32)
        exchanges = [self.exchange(style) for _ in range(turns)]
        if turns > 1 and rng.random() < 0.5:
            self.weave_memory(exchanges)
        system = {"plain": PLAIN_SYSTEMS, "brief": BRIEF_SYSTEMS, "pirate": PIRATE_SYSTEMS}.get(
            style
        )
        messages = [message for exchange in exchanges for message in exchange]
        if style == "named":
            name = person(rng)
            form = rng.choice(
                ["Your name is {}.", "You are {}, a helpful assistant.", "You are called {}."]
            )
            messages = [*self.own_name(name), *messages] if rng.random() < 0.8 else messages
            return Conversation([{"role": "system", "content": form.format(name)}, *messages], [])
        first = [{"role": "system", "content": rng.choice(system)}] if system else []
        return Conversation(first + messages, [])

    def own_name(self, name: str) -> list[Message]:
        question = form(self.rng, "own name")
        return [user(scuff(self.rng, question, True)), assistant(f"I am {name}.")]

    def weave_memory(self, exchanges: list[list[Message]]) -> None:
        """Put personal facts early and their questions later among the exchanges."""
        kinds = {
            self.rng.choices(range(5), [4, 2, 1, 1, 1])[0] for _ in range(1 + len(exchanges) // 4)
        }
        turns = [memory_turns(self.rng, kind) for kind in sorted(kinds)]
        for first, second in turns:
            later = self.rng.randint(0, len(exchanges))
            exchanges.insert(later, second)
            if first:
                exchanges.insert(min(self.rng.randint(0, later), self.rng.randint(0, later)), first)

    def exchange(self, style: str) -> list[Message]:
        rng = self.rng
        if not style and rng.random() < 0.02:
            return toolless_weather(rng)
        ask: Ask = rng.choices(self.makers, self.weights)[0](rng)
        question, answer = scuff(rng, ask.question, ask.fold), ask.answer
        if style == "brief" and ask.brief:
            answer = ask.brief
        elif style == "pirate" and not answer.startswith("{"):
            answer = f"Arr! {answer}"
        elif not style and ask.brief and ask.fold and rng.random() < 0.04:
            question, answer = f"{question} {rng.choice(BRIEF_WISHES)}", ask.brief
        return [user(question), assistant(answer)]

    def with_tools(self) -> Conversation:
        rng = self.rng
        tools = offered_tools(rng)
        messages: list[Message] = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.choice(PLAIN_SYSTEMS)})
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            messages += tool_turn(rng, tools) if rng.random() < 0.75 else self.exchange("tools")
            if messages[-1].get("tool_calls"):
                break
        return Conversation(messages, tools)
