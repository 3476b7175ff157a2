"""Custom tools of a real server: what a grammar holds matches it, streamed and whole."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.support.input_grammars import InputGrammar, matches, random_grammar
from tests.support.openai_spec import sse_events
from tests.support.serve import Server, serving

CUT = {"max_output_tokens": 60}


def respond(server: Server, grammar: InputGrammar, seed: int, **fields: Any) -> list[Any]:
    """Return the response, and the same one as the events of a stream end with it."""
    format = {"type": "grammar", "syntax": grammar.syntax, "definition": grammar.definition}
    tools = [{"type": "function", "name": "now"}, {"type": "custom", "name": "f", "format": format}]
    body = {"input": "Write.", "tools": tools, "tool_choice": {"type": "custom", "name": "f"}}
    body |= {"seed": seed, "temperature": 1, "max_output_tokens": 200, **fields}
    body["frequency_penalty"] = 0.5  # else a small model repeats a digit without end
    with httpx2.Client(base_url=server.base_url, timeout=60) as client:
        whole = client.post("/v1/responses", json=body)
        assert whole.status_code == 200, whole.text
        events = sse_events(client.post("/v1/responses", json={**body, "stream": True}).text)
    streamed = "".join(e["delta"] for e in events if e["type"].endswith("tool_call_input.delta"))
    ended = events[-1]["response"]
    assert [item["input"] for item in ended["output"]] == [streamed]
    return [whole.json(), ended]


def check(server: Server, seed: int) -> bool:
    """Check the inputs that a random grammar allows. Return whether they are complete."""
    grammar = random_grammar(seed)
    whole, streamed = respond(server, grammar, seed)
    (item,) = whole["output"]
    assert streamed["output"][0]["input"] == item["input"]
    assert streamed["status"] == whole["status"] == item["status"]
    if whole["status"] == "completed":
        assert matches(grammar, item["input"]) is not False, (grammar, item["input"])
    return bool(whole["status"] == "completed")


@pytest.mark.variants(2)
@pytest.mark.parametrize("seed", range(1, 13, 2))  # regular expressions, which `re` checks
def test_input_matches_its_expression(demo: Server, seed: int) -> None:
    assert check(demo, seed)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["safetensors", "dummy"])  # the demo's, and random ones
def test_inputs_match_300_random_grammars(weights: str) -> None:
    """Some repeat digits or ignored spaces, which have no limit, until they are cut."""
    pytest.importorskip("lark")
    with serving("demo", "--load-format", weights) as server:
        assert sum(check(server, seed) for seed in range(300)) > 285


def test_cut_input_is_incomplete(demo: Server) -> None:
    for response in respond(demo, InputGrammar("regex", "[a-z]{400} end"), 1, **CUT):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in response["output"]] == ["incomplete"]


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("syntax", "definition", "construct"),
    [
        ("lark", "start: A\nA.2: /a/", "priority not supported"),
        ("lark", "start: b", 'unknown name: "b"'),
        ("lark", "start: /(?=a)b/", "look-around"),
        ("lark", "%declare X\nstart: X", "declare statement not supported"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", r"a\b", "lookarounds not supported"),
        ("regex", "[a", "unclosed character class"),
    ],
)
def test_grammar_that_cannot_be_followed_names_the_construct(
    demo: Server, syntax: str, definition: str, construct: str
) -> None:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "f", "format": format}]
    with httpx2.Client(base_url=demo.base_url, timeout=60) as client:
        for stream in (False, True):
            body = {"input": "Write.", "tools": tools, "stream": stream}
            error = client.post("/v1/responses", json=body).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_grammar", "tools")
            assert construct in error["message"]
