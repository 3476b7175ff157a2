"""The case grammar-cost: its hostile grammars reach the engine, and its times count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.http_client import Completion
from loadtest.micro.grammar_cost import gaps_between
from loadtest.micro.grammar_times import measure, read_schemas
from loadtest.micro.hostile_grammars import KINDS, hostile_bodies
from server.api.openai.schemas.structured import StructuredOutputs
from tests.support.reference_data import LLAMA, located

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_hostile_grammars_differ_and_are_sound_fields() -> None:
    bodies = hostile_bodies(2 * len(KINDS))
    assert len({json.dumps(body) for body in bodies}) == len(bodies)
    for body in bodies:
        fields = StructuredOutputs.model_validate(body["structured_outputs"])
        assert fields.wanted("structured_outputs").value


def test_measure_times_each_schema_and_each_mask() -> None:
    folder = located(LLAMA)
    times = measure(folder, 2, [SCHEMA, {"not": SCHEMA}, True])
    assert len(times.compile) == 2
    assert times.refused == 2
    assert len(times.mask) >= 5  # {"a":1}


def test_read_schemas_reads_functions_with_types_of_python(tmp_path: Path) -> None:
    file = tmp_path / "functions.jsonl"
    parameters = {"type": "dict", "properties": {"a": {"type": "float", "default": 1}}}
    rows = [
        {"name": "x", "schema": SCHEMA},
        {"function": [{"name": "f", "parameters": parameters}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    expected = {"type": "object", "properties": {"a": {"type": "number"}}}
    assert read_schemas([file]) == [("x", SCHEMA), ("f", expected)]


def test_gaps_between_takes_those_that_overlap_the_period() -> None:
    completion = Completion(0.0, 9.0, (1.0, 2.0, 4.0, 7.0, 8.0), 5)
    assert gaps_between(completion, 3.0, 6.0) == pytest.approx([2.0, 3.0])
