"""The drawn tools: their calls fit their definitions, and their values are in the question."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.tool_topics import (
    JSON_TYPES,
    DrawnTool,
    Request,
    call_messages,
    draw_request,
    draw_tools,
    report_message,
    request_message,
    tool_material,
)

SHARES = [0.0, 1.0]


def requests(both_share: float, count: int = 500) -> list[tuple[list[DrawnTool], Request]]:
    rng = MaterialDraws(7)
    drawn = []
    for _ in range(count):
        tools = draw_tools(rng, rng.randint(1, 4))
        drawn.append((tools, draw_request(rng, tools, both_share)))
    return drawn


def parameters(tools: list[DrawnTool], name: str) -> dict[str, Any]:
    (schema,) = [tool.definition["function"] for tool in tools if tool.name == name]
    found: dict[str, Any] = schema["parameters"]
    return found


@pytest.mark.parametrize("both_share", SHARES)
def test_drawn_call_fits_the_definition_of_its_tool(both_share: float) -> None:
    for tools, request in requests(both_share):
        assert len(request.errands) == 1 + both_share
        for errand in request.errands:
            schema = parameters(tools, errand.name) | {"additionalProperties": False}
            jsonschema.validate(errand.arguments, schema)


@pytest.mark.parametrize("both_share", SHARES)
def test_drawn_request_contains_the_values_of_its_calls(both_share: float) -> None:
    rng = MaterialDraws(8)
    for _, request in requests(both_share):
        text = request_message(rng, request)["content"]
        for errand in request.errands:
            for value in errand.arguments.values():
                assert isinstance(value, bool) or str(value) in text


def test_drawn_tools_have_all_kinds_of_arguments() -> None:
    kinds = set()
    for tools, _ in requests(0.5):
        for tool in tools:
            for argument in tool.definition["function"]["parameters"]["properties"].values():
                kinds.add("enum" if "enum" in argument else argument["type"])
    assert kinds == {*JSON_TYPES.values(), "string", "enum"}


def test_drawn_tools_of_a_conversation_have_different_names() -> None:
    for tools, _ in requests(0.5):
        assert len({tool.name for tool in tools}) == len(tools)


def test_report_message_quotes_the_results_in_order() -> None:
    for _, request in requests(1.0):
        messages = call_messages(request.errands)
        report = report_message(request.errands)["content"]
        assert [message["content"] for message in messages[1:]] == [
            errand.result for errand in request.errands
        ]
        assert report == " ".join(errand.report for errand in request.errands)
        for errand in request.errands:
            if errand.result.isdigit():
                assert errand.result in errand.report


def test_tool_material_forms_name_only_slots_of_their_arguments() -> None:
    for kind in tool_material().tools:
        slots = dict.fromkeys(kind.arguments, "x") | {"noun": "x", "a2": "x", "result": "x"}
        for form in [*kind.names, *kind.descriptions, *kind.asks, *kind.both, kind.report]:
            assert "{" not in form.format(**slots)
