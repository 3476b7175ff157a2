"""The fields for structured output, as the engine receives them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import EOS
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, serving

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
BOUNDED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def source(served: Served, **fields: Any) -> Any:
    """Return the grammar that the engine gets."""
    served.engine.requests.clear()
    answer = await served.complete(prompt="a", **fields)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-params" not in answer.headers
    [request] = served.engine.requests
    if request.params.grammar is None:
        return None
    assert request.params.grammar.end_token_ids == (EOS,)
    assert EOS in request.params.stop_token_ids
    [grammar] = json.loads(request.params.grammar.source)["grammars"]
    return grammar.get("json_schema") or grammar["lark_grammar"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(SCHEMA)},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA), "ignore_eos": True},
        {"response_format": {"type": "text"}, "guided_json": SCHEMA, "regex": "", "grammar": ""},
    ],
    ids=str,
)
async def test_schema_reaches_the_engine_with_bounded_whitespace(served, fields):
    assert await source(served, **fields) == {**CLOSED, "x-guidance": BOUNDED}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
         {"whitespace_pattern": " ?"}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
         {"whitespace_flexible": False}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "\n"}, {"whitespace_pattern": "\n"}),
        ({"guided_json": {**SCHEMA, "x-guidance": {"lenient": True}}}, {"lenient": True}),
    ],
)  # fmt: skip
async def test_request_may_choose_the_whitespace(served, fields, options):
    assert await source(served, **fields) == {**CLOSED, "x-guidance": options}


@pytest.mark.parametrize(
    ("fields", "lark"),
    [
        ({"guided_regex": "[a-c]+/"}, r"start: /[a-c]+\//"),
        ({"structured_outputs": {"regex": "a|b"}}, "start: /a|b/"),
        ({"regex": "a|b"}, "start: /a|b/"),
        ({"guided_choice": ["a", 'b"c']}, r'start: "a" | "b\"c"'),
        ({"structured_outputs": {"choice": ["a"]}}, 'start: "a"'),
        ({"guided_grammar": 'start: "x"'}, 'start: "x"'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, 'start: "x"'),
        ({"grammar": 'root ::= "x" | "y"'}, 'start: "x" | "y"'),
        ({"ebnf": 'root ::= "x"'}, 'start: "x"'),
    ],
    ids=str,
)
async def test_pattern_choice_and_grammar_reach_the_engine(served, fields, lark):
    found = await source(served, **fields)
    assert " ".join(found.removeprefix("%llguidance {}").split()) == lark


STRUCTURES = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "structural_tag", **STRUCTURES}}, '"</f>"'),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, 'suffix="</f>"'),
        ({"structured_outputs": {"structural_tag": json.dumps(STRUCTURES)}}, '"</f>"'),
        ({"structured_outputs": {"structural_tag": {"format": TAG}}}, 'suffix="</f>"'),
    ],
    ids=str,
)
async def test_structural_tag_reaches_the_engine(served, fields, part):
    found = await source(served, **fields)
    assert found.startswith("start: ")
    assert part in found


async def test_json_object_and_missing_schema_are_any_object(served):
    formats = ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x"}})
    for response_format in formats:
        found = await source(served, response_format=response_format)
        assert found == {"type": "object", "x-guidance": BOUNDED}


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"grammar": ""}])
async def test_free_text_has_no_grammar(served, fields):
    assert await source(served, **fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "unsupported_parameter"),
        ({"response_format": {}}, "response_format", "unsupported_parameter"),
        ({"response_format": "json"}, "response_format", "unsupported_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "missing_required_parameter"),
        ({"response_format": json_schema([1])}, "response_format.json_schema.schema",
         "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": "[1]"}, "guided_json", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs",
         "invalid_value"),
        ({"structured_outputs": {"json": SCHEMA, "json_object": True}}, "structured_outputs",
         "invalid_value"),
        ({"structured_outputs": {"structural_tag": "{}"}},
         "structured_outputs.structural_tag.format", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag",
         "invalid_value"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag",
         "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format",
         "invalid_value"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}},
         "response_format.format", "unsupported_parameter"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a", 5]}, "guided_choice.1", "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "invalid_value"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
         "invalid_value"),
        ({"grammar": 'root ::= "a'}, "grammar", "invalid_value"),
    ],
    ids=str,
)  # fmt: skip
async def test_unusable_structured_output_names_the_field(served, fields, param, code):
    answer = await served.complete(prompt="a", **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"grammar": "\n".join(f'r{n} ::= "x"' for n in range(200))}, "grammar", "200 rules"),
        ({"guided_grammar": f'root ::= "{"x" * 20_000}"'}, "guided_grammar", "characters of GBNF"),
        ({"structured_outputs": {"json": {"anyOf": [
            {"patternProperties": {f"^{n}": {} for n in range(200)}}]}}},
         "structured_outputs.json", "200 patternProperties"),
    ],
    ids=["rules", "characters", "patterns"],
)  # fmt: skip
async def test_grammar_that_takes_long_to_read_is_refused(served, fields, param, limit):
    answer = await served.complete(prompt="a", **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert limit in error["message"]
    assert not served.engine.requests


async def test_model_without_end_token_has_no_structured_output(model, says, tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    async with serving(FakeEngine(says("x")), folder) as served:
        answer = await served.complete(prompt="a", guided_regex="a")
    assert answer.status_code == 400
    assert "no end token" in answer.json()["error"]["message"]
