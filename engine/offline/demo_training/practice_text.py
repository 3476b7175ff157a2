"""The text of the second stage: tools, thoughts and held JSON, mixed with the first stage's text.

The first stage's text stays in the mix, so that nothing is forgotten.
"""

from __future__ import annotations

from typing import Any

from engine.offline.demo_training.chat import Message, dump
from engine.offline.demo_training.material import Question
from engine.offline.demo_training.record_topics import INSTRUCTIONS, draw_form
from engine.offline.demo_training.text import Author, Conversation, exchange, topic_exchange
from engine.offline.demo_training.thought_topics import EFFORTS, SURE, Thought, draw_thoughtful
from engine.offline.demo_training.tool_topics import (
    DrawnTool,
    Errand,
    call_messages,
    draw_request,
    draw_tools,
    report_message,
    request_message,
)

# Kinds of conversations, with their relative weights.
PARTS = {
    "first stage": 42,
    "tools": 32,
    "thoughts": 13,
    "records": 11,
    "record tools": 3,
}
RECORD_TOOLS = ("Person", "Record", "Answer", "final_result", "extract", "save", "store_data")
JSON_SCHEMAS: dict[type, dict[str, str]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object"},
}
# From here on, the first stage's text has its long conversations.
LATE = 0.9


class PracticeAuthor:
    """Draws the conversations of the second stage from one seed."""

    def __init__(self, seed: int, held_out: frozenset[str]) -> None:
        self.author = Author(seed, held_out)
        self.rng = self.author.rng

    def compose(self) -> Conversation:
        """Return the next conversation. It contains no held-out text."""
        while True:
            conversation = self.draft()
            if not self.author.is_held_out(conversation):
                return conversation

    def draft(self) -> Conversation:
        """Return a conversation that may contain held-out text."""
        match self.rng.weighted(PARTS):
            case "tools":
                return self.with_tools()
            case "thoughts":
                return self.with_thoughts()
            case "records":
                return self.with_record()
            case "record tools":
                return self.with_record_tool()
        return self.author.compose(LATE)

    def opening(self) -> list[Message]:
        """Return a plain system message, or most often none."""
        if self.rng.chance(0.25):
            text = self.rng.form("plain system")
            return [{"role": "system", "content": text}]
        return []

    # ---- tools -------------------------------------------------------------------------------

    def with_tools(self) -> Conversation:
        """Return a conversation with one to four tools. A call without a result may end it."""
        rng = self.rng
        tools = draw_tools(rng, rng.choice([1, 1, 2, 2, 2, 3, 3, 4]))
        effort = rng.weighted(EFFORTS) if rng.chance(0.2) else "none"
        messages = self.opening()
        for _ in range(rng.choice([1, 2, 2, 3])):
            if rng.chance(0.2):
                messages += self.unneeded(effort)
            else:
                messages += self.served(tools, effort)
        if rng.chance(0.2) and messages[-2]["role"] == "tool":
            while messages[-1].get("tool_calls") is None:
                messages.pop()
        definitions = [tool.definition for tool in tools]
        return Conversation(messages, definitions, effort)

    def unneeded(self, effort: str) -> list[Message]:
        """Return an exchange that needs no tool."""
        if effort == "none":
            return topic_exchange(self.rng, "tools")
        question, thought, answer = draw_thoughtful(self.rng)
        asked, answered = exchange(self.rng, question._replace(answer=answer))
        thought = thought._replace(opening="I need no tool.")
        answered["reasoning_content"] = thought.written(effort)
        return [asked, answered]

    def served(self, tools: list[DrawnTool], effort: str) -> list[Message]:
        """Return a request, its calls, their results and the report."""
        request = draw_request(self.rng, tools, both_share=0.45)
        asked = request_message(self.rng, request)
        called, *results = call_messages(request.errands)
        reported = report_message(request.errands)
        if effort != "none":
            called["reasoning_content"] = call_thought(request.errands).written(effort)
            reported["reasoning_content"] = report_thought(request.errands).written(effort)
        return [asked, called, *results, reported]

    # ---- thoughts and records ----------------------------------------------------------------

    def with_thoughts(self) -> Conversation:
        """Return a conversation whose last answer has a thought."""
        rng = self.rng
        messages = self.opening()
        if rng.chance(0.25):
            messages += topic_exchange(rng, "plain")
        effort = rng.weighted(EFFORTS)
        question, thought, answer = draw_thoughtful(rng)
        asked, answered = exchange(rng, question._replace(answer=answer))
        answered["reasoning_content"] = thought.written(effort)
        return Conversation([*messages, asked, answered], [], effort)

    def with_record(self) -> Conversation:
        """Return a question and the JSON answer that a grammar holds."""
        rng = self.rng
        form = draw_form(rng)
        messages: list[Message] = []
        instruction = rng.choice(INSTRUCTIONS)
        if instruction:
            messages.append({"role": "system", "content": instruction})
        question = Question(form.text, dump(form.values), foldable=False)
        messages += exchange(rng, question)
        return Conversation(messages, [], is_held=True)

    def with_record_tool(self) -> Conversation:
        """Return a sentence with facts, and the call that stores them."""
        rng = self.rng
        form = draw_form(rng)
        name = rng.choice(RECORD_TOOLS)
        properties = {key: JSON_SCHEMAS[type(value)] for key, value in form.values.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function: dict[str, Any] = {"name": name, "parameters": parameters}
        if rng.chance(0.6):
            function = {"name": name, "description": "Store the data", "parameters": parameters}
        errand = Errand(name, form.values, "ok", "")
        asked = {"role": "user", "content": form.text}
        called = call_messages([errand])[0]
        messages = [*self.opening(), asked, called]
        return Conversation(messages, [{"type": "function", "function": function}])


def call_thought(errands: list[Errand]) -> Thought:
    """Return the thought before a call: which tools, and with which values."""
    count = "one call" if len(errands) == 1 else "two calls"
    plans = []
    for errand in errands:
        values = ", ".join(dump(value) for value in errand.arguments.values())
        plans.append(f"{errand.name}: {values}.")
    return Thought(f"I need {count}.", " ".join(plans), SURE)


def report_thought(errands: list[Errand]) -> Thought:
    """Return the thought after the results of the calls."""
    if len(errands) == 1:
        return Thought("I have the result.", "", "I report it.")
    return Thought("I have both results.", "", "I report them in order.")
