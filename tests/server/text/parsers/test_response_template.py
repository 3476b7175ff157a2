"""Response templates: their formats read what transformers' own parser reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers.utils.chat_parsing import parse_response

from server.text.load_template import TemplateFile, open_template
from server.text.marks import Marks
from server.text.parsers.call_grammar import call_grammar
from server.text.parsers.detect import AnswerFormat, Prober, detect
from server.text.parsers.formats import (
    BY_NAME,
    CallFormat,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    Reasoning,
    TaggedCall,
)
from server.text.parsers.response_template import TranslatedTemplate, translated
from server.text.parsers.syntax import State, Syntax, literals, make_syntax
from server.text.tools import Tool, ToolUse
from tests.support.parsing import check_cuts, parse
from tests.support.thorough import examples
from tests.support.written_calls import written

pytestmark = pytest.mark.usefixtures("renders_here")

BYTES = LLTokenizer("byte")
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = {"weather": Tool("weather", SCHEMA, {}), "now": Tool("now", {"type": "object"}, {})}
FOR_TRANSFORMERS = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    for tool in TOOLS.values()
]


def template(**fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|start|>", "fields": fields}


class Case(NamedTuple):
    template: dict[str, Any]
    answer: str
    start: State = State.CONTENT


JSON_CALLS = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": WHOLE,
}
CASES = {
    "json": Case(
        template(
            thinking=THINKING,
            tool_calls=JSON_CALLS,
            content={"close": "<|im_end|>", "content": "text"},
        ),
        "<think>\nWell.\n</think>\n\nOne moment."
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>',
    ),
    "patterns": Case(
        template(
            reasoning_content=THINKING,
            tool_calls={**JSON_CALLS, "open": ["<tool_call>", "<call>"]},
            content={"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        ),
        "<think>Well.</think>One moment."
        '<call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
    ),
    "xml-inline": Case(
        template(
            thinking=THINKING,
            tool_calls={
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": NAMED,
            },
        ),
        "<think>Well.</think>"
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome, Italy\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "xml-inline of two tags": Case(
        template(
            tool_calls={
                "open_pattern": r"<call>(?P<function>[^\n<]+)",
                "close": "</call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<k>(?P<key>.*?)</k>\s*<v>(?P<value>.*?)</v>",
                },
                "transform": {"function": {"name": "{function}", "arguments": "{content}"}},
            },
            content={},
        ),
        "One moment.<call>weather\n<k>city</k>\n<v>Rome</v>\n<k>days</k><v>3</v>\n</call>",
    ),
    "kv-lines": Case(
        template(
            tool_calls={
                "open_pattern": r"<call (?P<name>[\w-]+)>",
                "close": "</call>",
                "repeats": True,
                "content": "kv-lines",
                "transform": NAMED,
            },
            content={"close": "<|end|>"},
        ),
        "One moment.\n<call weather>\ncity:  Rome: the eternal city \n\nno pair\ndays: 3\n</call>"
        "<call now></call>",
    ),
    "json after a name": Case(
        template(
            tool_calls={
                "open_pattern": r"<\|call\|>functions\.(?P<name>\w+)<\|args\|>",
                "close": "<|call_end|>",
                "repeats": True,
                "content": "json",
                "transform": NAMED,
            },
            content={},
        ),
        'Hm.<|call|>functions.weather<|args|>{"city": "Rome", "days": 3}<|call_end|>',
    ),
    "list": Case(
        template(
            content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            tool_calls={
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{tool_name}", "arguments": "{parameters}"},
                },
            },
        ),
        "<|START_THINKING|>Well.<|END_THINKING|><|START_RESPONSE|>Hm.<|END_RESPONSE|>"
        '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Rome"}},\n'
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    ),
    "keys within": Case(
        template(
            tool_calls={
                **JSON_CALLS,
                "transform": {
                    "function": {"name": "{content.tool}", "arguments": "{content.args}"}
                },
            },
        ),
        '<tool_call>{"tool": "weather", "args": {"city": "Rome"}}</tool_call>',
    ),
    "gemma": Case(
        template(
            thinking={"open": "<|channel>thought\n", "close": "<channel|>"},
            tool_calls={
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAMED,
            },
            content={"close": ["<turn|>", "<eos>"]},
        ),
        "<|channel>thought\nWell.<channel|>Hm."
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|><turn|>',
    ),
    "reasoning at once": Case(
        template(
            thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            content={"open": "<response>\n", "close_pattern": r"\n?</response>"},
            tool_calls=JSON_CALLS,
        ),
        "Well.\n</think>\n\n<response>\nHm.\n</response>\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        State.REASONING,
    ),
}  # fmt: skip


def syntax_of(found: TranslatedTemplate, *, tokens: bool = False) -> Syntax:
    used = [text.strip() for text in literals(found.calls, found.reasoning, found.other)]
    marks = [text for text in used if text[0] == "<" and text[-1] == ">"] if tokens else []
    ids = {text: index for index, text in enumerate(dict.fromkeys(marks))}
    return make_syntax(found.calls, found.reasoning, Marks(ids), found.other)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answer_parses_as_transformers_parses_it(case: Case, tokens: bool) -> None:
    found = translated(case.template)
    assert not found.problems
    syntax = syntax_of(found, tokens=tokens)
    answer = parse(syntax, [syntax.marks.encode(case.answer)], TOOLS, start=case.start)
    expected = parse_response(
        case.answer, copy.deepcopy(case.template), prefix="", tools=FOR_TRANSFORMERS
    )
    calls = [call["function"] for call in expected["tool_calls"]]
    names = ("name", "arguments") if "name" in calls[0] else ("tool", "args")
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [
        tuple(call[name] for name in names) for call in calls
    ]
    reasoning = expected.get("thinking") or expected.get("reasoning_content", "")
    assert answer.reasoning == reasoning
    assert answer.content == expected.get("content", "")
    assert set(answer.outcomes) == {"valid"}
    check_cuts(syntax, case.answer, TOOLS, start=case.start)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("json", JsonCall),
        ("xml-inline", TaggedCall),
        ("kv-lines", LinesCall),
        ("json after a name", NamedCall),
        ("gemma", GemmaCall),
    ],
)
def test_template_becomes_data_for_the_one_parser(name: str, body: type) -> None:
    format = translated(CASES[name].template).calls
    assert isinstance(format, CallFormat)
    assert isinstance(format.body, body)


def test_template_of_channels_is_harmony() -> None:
    channel = "<|channel|>commentary"
    fields = template(
        thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        content={"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        tool_calls={
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
    )
    found = translated(fields)
    assert found == TranslatedTemplate(ChannelFormat())
    answer = (
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{channel} to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    )
    syntax = syntax_of(found)
    parsed = parse(syntax, [answer], TOOLS, start=State.HEADER)
    expected = parse_response(answer, fields, prefix="")
    assert parsed.reasoning == expected["thinking"]
    assert json.loads(parsed.calls[0][1]) == expected["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("text", "fields is not an object"),
        ({"fields": []}, "fields is not an object"),
        ({"version": 2, "fields": {}}, "version 2 is not known"),
        (template(tool_calls=[]), "field tool_calls: is not an object"),
        (template(plan={"open": "<p>"}), "field plan: has no place in an answer"),
        (template(thinking={"close": "</think>"}), "field thinking: has no open and close"),
        (template(thinking={**THINKING, "content": "int"}), "field thinking: is no plain text"),
        (template(thinking={**THINKING, "open": ["", "<t>"]}), "field thinking: open has a blank"),
        (template(thinking={"open_pattern": "<t.+>", "close": "x"}), "field thinking: a delimiter"),
        (template(thinking={"open_pattern": "<t(?=x)", "close": "x"}), "field thinking: open_pat"),
        (template(content={"close_pattern": "(" * 99}), "field content: close_pattern: "),
        (template(tool_calls={**JSON_CALLS, "transform": None}), "field tool_calls: transform"),
        (
            template(tool_calls={**JSON_CALLS, "content": "text"}),
            "field tool_calls: content 'text'",
        ),
        (template(tool_calls={**JSON_CALLS, "open": 3}), "field tool_calls: open is no text"),
        (
            template(tool_calls={**JSON_CALLS, "content_args": {"unquoted_keys": True}}),
            "field tool_calls: content_args: calls are not JSON",
        ),
        (
            template(tool_calls={**JSON_CALLS, "transform": NAMED}),
            "field tool_calls: open_pattern has no group for the name",
        ),
    ],
)
def test_field_without_equivalent_is_named_and_the_others_are_read(given, problem) -> None:
    if isinstance(given, dict) and isinstance(given.get("fields"), dict) and given["fields"]:
        given["fields"].setdefault("reasoning", THINKING)
    found = translated(given)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(problem), found.problems
    if problem.startswith("field "):
        assert found.reasoning == Reasoning("<think>", "</think>")


KEYS = st.sampled_from(
    ["open", "close", "open_pattern", "close_pattern", "content", "content_args", "transform",
     "transform_each", "repeats", "tag_pattern", "kv_sep", "line_sep", "string_delims", "function",
     "name", "arguments"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(), inner, max_size=6)
    ),
    max_leaves=20,
)
FIELDS = st.dictionaries(
    st.sampled_from(["content", "thinking", "tool_calls", "x"]),
    st.dictionaries(KEYS, JSON | st.sampled_from(["json", "xml-inline", "kv-lines", NAMED, WHOLE])),
)


@settings(max_examples=examples(100), deadline=None)
@given(fields=FIELDS, text=st.text(max_size=50))
def test_any_object_is_translated_or_named(fields, text) -> None:
    found = translated({"fields": fields})
    syntax = syntax_of(found)
    assert parse(syntax, [text], TOOLS) == parse(syntax, list(text), TOOLS)


@pytest.mark.parametrize("pattern", ["(?:a|b)" * 40, "(?:" * 500, "x" * 10_000, "(?P<n>" * 99])
def test_hostile_pattern_is_refused_at_once(pattern: str) -> None:
    found = translated(template(content={"close_pattern": pattern}))
    assert found.problems


@pytest.mark.parametrize("name", ["json", "xml-inline", "kv-lines", "json after a name", "list"])
def test_grammar_of_template_accepts_its_calls(name: str) -> None:
    """The grammar's own tests need a vocabulary; a byte each is enough here."""
    found = translated(CASES[name].template)
    syntax = syntax_of(found)
    answers = AnswerFormat(found.calls, None, "response_template", True, syntax, syntax)
    use = ToolUse(list(TOOLS.values()), "required")
    grammar = call_grammar(answers, use, State.CONTENT, {"whitespace_pattern": "[ \n]{0,8}"})
    assert found.calls is not None
    good = written(found.calls, [("weather", {"city": "Rome", "days": 3}), ("now", {})])
    assert is_accepted(grammar, good)
    assert not is_accepted(grammar, written(found.calls, [("weather", {"days": 3})]))
    called = parse(syntax, [good], TOOLS)
    assert called.outcomes == ["valid", "valid"]


def is_accepted(grammar: str, text: str) -> bool:
    source = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


# ---- detection -----------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ CALL }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINES = (
    "<call {{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}{{ k }}: "
    "{{ v if v is string else v | tojson }}\n{% endfor %}</call>\n"
)


def detected(tmp_path: Path, call: str, given: object) -> tuple[AnswerFormat, Prober]:
    source = CHAT.replace("{{ CALL }}", call)
    chat_template = open_template(TemplateFile(source, tmp_path / "template.jinja"), {})
    try:
        prober = Prober(chat_template.render, source, {}, frozenset(), translated(given))
        return detect(prober), prober
    finally:
        chat_template.close()


def test_response_template_is_read_before_the_table(tmp_path: Path) -> None:
    given = CASES["kv-lines"].template
    answers, prober = detected(tmp_path, LINES, given)
    assert (answers.source, answers.round_trips) == ("response_template", True)
    assert answers.calls.separator == "\n"  # as the chat template has it
    assert prober.problems == []
    assert detected(tmp_path, LINES, None)[0].calls is None


def test_marks_of_the_table_have_its_white_space(tmp_path: Path) -> None:
    answers, _ = detected(tmp_path, "", CASES["xml-inline"].template)
    assert (answers.calls, answers.source) == (BY_NAME["qwen3_coder"], "response_template")
    assert answers.reasoning == Reasoning("<think>", "</think>")


def test_response_template_that_does_not_read_the_calls_is_not_used(tmp_path: Path) -> None:
    call = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    answers, prober = detected(tmp_path, call, CASES["kv-lines"].template)
    assert (answers.calls, answers.source) == (BY_NAME["hermes"], "table")
    assert "field tool_calls" in prober.problems[0]


def test_untranslatable_calls_fall_to_the_table(tmp_path: Path) -> None:
    call = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    given = template(tool_calls={**JSON_CALLS, "transform": None}, thinking=THINKING)
    answers, prober = detected(tmp_path, call, given)
    assert (answers.calls, answers.source) == (BY_NAME["hermes"], "table")
    assert answers.reasoning == Reasoning("<think>", "</think>")
    assert len(prober.problems) == 1
