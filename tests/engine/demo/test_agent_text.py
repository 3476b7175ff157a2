"""The conversations of the third stage: results of all kinds, and long prompts."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from tokenizers import Tokenizer

from engine.offline.demo_training.agent_forms import SLOTS, Slots, agent_material
from engine.offline.demo_training.agent_text import LONG_PARTS, LONGEST, AgentAuthor
from engine.offline.demo_training.chat import FOLDER, SPECIAL_TOKENS, render_text
from engine.offline.demo_training.evaluate import read_probes
from engine.offline.demo_training.long_prompts import dressed, long_text, wide_tool
from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.text import held_out_of
from engine.offline.demo_training.tool_topics import draw_tools
from engine.offline.demo_training.train import Agent
from engine.offline.demo_training.vocabulary import encode


def author(seed: int = 3) -> AgentAuthor:
    return AgentAuthor(seed, held_out_of(read_probes()))


def test_author_same_seed_draws_same_conversations() -> None:
    first, second, other = author(), author(), author(4)
    drawn = [first.compose() for _ in range(200)]
    assert drawn == [second.compose() for _ in range(200)]
    assert drawn != [other.compose() for _ in range(200)]


def test_result_is_always_followed_by_a_text() -> None:
    drawing = author()
    counts: Counter[str] = Counter()
    for _ in range(300):
        messages = drawing.with_results().messages
        for message, following in pairwise(messages):
            if message["role"] == "tool":
                counts[following["role"]] += 1
                assert following["role"] == "tool" or following["content"]
                assert not following.get("tool_calls")
        assert messages[-1]["role"] == "assistant"
    assert counts["assistant"] > 200


@pytest.mark.parametrize("part", LONG_PARTS)
def test_long_conversation_has_its_size_and_ends_with_an_answer(part: str) -> None:
    drawing = author()
    size = 3000
    drawing.rng.weighted = lambda weights: (  # type: ignore[method-assign]
        part if weights is LONG_PARTS else MaterialDraws.weighted(drawing.rng, weights)
    )
    for _ in range(5):
        conversation = drawing.behind(size)
        text = render_text(conversation.messages, conversation.tools)
        assert len(text) >= size
        assert conversation.messages[-1]["role"] == "assistant"


def test_longest_conversations_fit_the_context() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    config = json.loads((FOLDER / "config.json").read_text())
    course = Agent(config)
    assert course.config.max_positions == 16384
    drawing = author()
    cut = 0
    for _ in range(12):
        ids = encode(tokenizer, drawing.behind(LONGEST), 99_999).ids
        assert len(ids) > 4000
        cut += len(ids) > course.config.max_positions
    assert cut <= 6


def test_long_text_has_no_special_token() -> None:
    text = long_text(MaterialDraws(5), 100_000)
    assert not any(token in text for token in SPECIAL_TOKENS)


def test_wide_tool_is_a_definition_with_a_schema() -> None:
    rng = MaterialDraws(6)
    for _ in range(200):
        function = wide_tool(rng)["function"]
        parameters = function["parameters"]
        assert function["description"]
        assert parameters["type"] == "object"
        assert set(parameters["required"]) <= set(parameters["properties"])


def test_dressed_tool_keeps_its_name_and_arguments() -> None:
    rng = MaterialDraws(7)
    for tool in draw_tools(rng, 40):
        function = dressed(rng, tool.definition)["function"]
        original = tool.definition["function"]
        assert function["name"] == original["name"]
        assert function["parameters"]["type"] == "object"
        properties = function["parameters"]["properties"]
        assert properties.keys() == original["parameters"]["properties"].keys()


def test_agent_forms_have_only_known_slots() -> None:
    rng = MaterialDraws(8)
    known = {*SLOTS, "text", "question", ""}
    for forms in agent_material().forms.values():
        for form in forms:
            slots = Slots(rng)
            slots.update(text="x", question="x")
            shown = form.replace("{}", "x").format_map(slots)
            assert "{" not in shown
            assert {slot.rstrip("2") for slot in slots} <= known
