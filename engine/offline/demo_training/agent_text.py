"""The text of the later stages: results of tools of all kinds, and questions behind long prompts.

The text of the earlier stages stays in the mix, so that nothing is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from engine.offline.demo_training.agent_forms import agent_material, fill
from engine.offline.demo_training.chat import Message
from engine.offline.demo_training.long_prompts import dressed, long_text, wide_tool
from engine.offline.demo_training.practice_text import (
    LATE,
    PracticeAuthor,
    call_thought,
    report_thought,
)
from engine.offline.demo_training.result_topics import draw_result
from engine.offline.demo_training.text import Conversation, Tool, topic_exchange
from engine.offline.demo_training.thought_topics import EFFORTS
from engine.offline.demo_training.tool_topics import (
    DrawnTool,
    call_messages,
    draw_request,
    draw_tools,
    report_message,
    request_message,
)

# Kinds of conversations in the later stages, with their relative weights.
PARTS = {
    "second stage": 51,
    "results": 44,
    "long": 5,
}
# Most of these conversations are those of the first two stages.
REVIEW_PARTS = {
    "first stage": 30,
    "second stage": 46,
    "results": 19,
    "long": 5,
}
# Characters of a long prompt. A token has about two, and the context about 8,000 tokens.
SHORTEST, LONGEST = 400, 15_000
# Where a long text stands, with relative weights.
LONG_PARTS = {
    "system": 5,
    "tools": 4,
    "document": 2,
    "result": 1,
    "chat": 2,
}


class AgentAuthor:
    """Draws the conversations of the later stages from one seed."""

    def __init__(
        self, seed: int, held_out: frozenset[str], parts: Mapping[str, float] = PARTS
    ) -> None:
        self.parts = parts
        self.practice = PracticeAuthor(seed, held_out)
        self.author = self.practice.author
        self.rng = self.author.rng

    def compose(self) -> Conversation:
        """Return the next conversation. It contains no held-out text."""
        return self.fresh(self.draft)

    def fresh(self, draft: Callable[[], Conversation]) -> Conversation:
        """Return a drawn conversation without held-out text."""
        while True:
            conversation = draft()
            if not self.author.is_held_out(conversation):
                return conversation

    def draft(self) -> Conversation:
        match self.rng.weighted(self.parts):
            case "first stage":
                return self.author.compose(LATE)
            case "results":
                return self.with_results()
            case "long":
                return self.behind(self.size())
        return self.practice.draft()

    def size(self) -> int:
        """Return a number of characters. Each order of magnitude is as frequent as the next."""
        return round(math.exp(self.rng.uniform(math.log(SHORTEST), math.log(LONGEST))))

    # ---- results of tools --------------------------------------------------------------------

    def with_results(self) -> Conversation:
        """Return a conversation with tools, whose results are of all kinds."""
        rng = self.rng
        tools = draw_tools(rng, rng.choice([1, 1, 1, 2, 2, 3, 4]))
        effort = rng.weighted(EFFORTS) if rng.chance(0.15) else "none"
        messages: list[Message] = []
        if rng.chance(0.5):
            messages.append({"role": "system", "content": fill(rng, "agents")})
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if rng.chance(0.12) and effort == "none":
                messages += topic_exchange(rng, "tools")
            else:
                messages += self.served(tools, effort)
        definitions = [self.definition(tool) for tool in tools]
        return Conversation(messages, definitions, effort)

    def definition(self, tool: DrawnTool) -> Tool:
        return dressed(self.rng, tool.definition) if self.rng.chance(0.6) else tool.definition

    def served(self, tools: list[DrawnTool], effort: str = "none") -> list[Message]:
        """Return a request, its calls, their results and the report."""
        rng = self.rng
        request = draw_request(rng, tools, both_share=0.15)
        kinds = {tool.name: tool.kind for tool in tools}
        errands = [draw_result(rng, errand, kinds[errand.name]) for errand in request.errands]
        asked = request_message(rng, request)
        called, *results = call_messages(errands)
        reported = report_message(errands)
        if effort != "none":
            called["reasoning_content"] = call_thought(errands).written(effort)
            reported["reasoning_content"] = report_thought(errands).written(effort)
        return [asked, called, *results, reported]

    # ---- long prompts ------------------------------------------------------------------------

    def behind(self, size: int) -> Conversation:
        """Return questions behind `size` characters of other text."""
        match self.rng.weighted(LONG_PARTS):
            case "tools":
                return self.behind_tools(size)
            case "document":
                return self.behind_document(size)
            case "result":
                return self.behind_result(size)
            case "chat":
                return self.behind_chat(size)
        text = long_text(self.rng, size)
        if self.rng.chance(0.4):
            text = f"{fill(self.rng, 'agents')}\n\n{text}"
        system: Message = {"role": "system", "content": text}
        if self.rng.chance(0.4):
            tools = draw_tools(self.rng, self.rng.randint(1, 3))
            definitions = [self.definition(tool) for tool in tools]
            return Conversation([system, *self.exchanges(tools)], definitions)
        return Conversation([system, *self.exchanges([])], [])

    def exchanges(self, tools: list[DrawnTool]) -> list[Message]:
        """Return one to five exchanges. Without tools they are about all topics."""
        messages: list[Message] = []
        for _ in range(self.rng.choice([1, 2, 2, 3, 4, 5])):
            if tools and self.rng.chance(0.6):
                messages += self.fresh(lambda: Conversation(self.served(tools), [])).messages
            else:
                messages += self.plain("tools" if tools else "plain")
        return messages

    def plain(self, style: str) -> list[Message]:
        return self.fresh(lambda: Conversation(topic_exchange(self.rng, style), [])).messages

    def behind_tools(self, size: int) -> Conversation:
        """Return questions behind the definitions of many tools."""
        rng = self.rng
        tools = draw_tools(rng, rng.randint(1, 3))
        definitions = [self.definition(tool) for tool in tools]
        length = 0
        while length < size:
            other = wide_tool(rng)
            length += len(str(other))
            definitions.append(other)
        rng.shuffle(definitions)
        messages: list[Message] = []
        if rng.chance(0.6):
            messages.append({"role": "system", "content": fill(rng, "agents")})
        return Conversation([*messages, *self.exchanges(tools)], definitions)

    def behind_document(self, size: int) -> Conversation:
        """Return a question in one message with a long text."""
        rng = self.rng
        asked, answered = self.plain("plain")
        form = rng.choice(agent_material().forms["documents"])
        text = form.format(text=long_text(rng, size), question=asked["content"])
        messages = [{"role": "user", "content": text}, answered]
        return Conversation([*messages, *self.plain("plain")], [])

    def behind_result(self, size: int) -> Conversation:
        """Return a tool loop, whose result goes on with a long text."""
        rng = self.rng
        tools = draw_tools(rng, rng.randint(1, 3))
        request = draw_request(rng, tools, both_share=0.0)
        kinds = {tool.name: tool.kind for tool in tools}
        (errand,) = request.errands
        errand = draw_result(rng, errand, kinds[errand.name])
        lines = f"{errand.result}\n{long_text(rng, size)}"
        errands = [errand._replace(result=lines)]
        asked = request_message(rng, request)
        messages = [asked, *call_messages(errands), report_message(errands)]
        return Conversation(messages, [self.definition(tool) for tool in tools])

    def behind_chat(self, size: int) -> Conversation:
        """Return a long conversation about all topics."""
        messages: list[Message] = []
        length = 0
        while length < size:
            pair = self.plain("plain")
            length += sum(len(message["content"]) + 30 for message in pair)
            messages += pair
        return Conversation(messages, [])
