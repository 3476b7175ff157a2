"""Chat templates render as in transformers, and hostile templates are harmless."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ConfigError
from server.text import render_pool
from server.text.chat_template import ChatTemplate, TemplateError
from server.text.load_template import load_template
from tests.support.reference_data import LLAMA, located, reference, references

USER = {"role": "user", "content": 'Hi <&> "你好"\n'}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of <b>"été"</b> & more',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City"},
                "days": {"type": ["integer", "null"], "enum": [1, 2]},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": " Hello ", "reasoning": "hm", "tool_calls": None},
    USER,
]
CALL = {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call12345", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "sunny"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": TURNS},
    "system and turns": {"messages": [SYSTEM, *TURNS]},
    "no prompt": {
        "messages": [USER, {"role": "assistant", "content": "Yo"}],
        "add_generation_prompt": False,
    },
    "continued": {
        "messages": [USER, {"role": "assistant", "content": " The capital of\n"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "thought continued": {
        "messages": [USER, {"role": "assistant", "content": "<think>a</think>b"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "user continued": {
        "messages": [USER],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 2}]},
    "tools": {"messages": [USER], "tools": [TOOL]},
    "system and turns with tools": {"messages": [SYSTEM, *TURNS], "tools": [TOOL]},
    "tool result": {"messages": [USER, CALLS, RESULT, USER], "tools": [TOOL, TOOL]},
    "tool result last": {"messages": [SYSTEM, USER, CALLS, RESULT], "tools": [TOOL]},
    "tool result without tools": {"messages": [USER, CALLS, RESULT, USER]},
    "argument": {"messages": [USER], "enable_thinking": False},
    "wrong order": {"messages": [{"role": "assistant", "content": "a"}, {"role": "nobody"}]},
}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return located(LLAMA)


@pytest.fixture(scope="module")
def transformers_tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


def template_of(tmp_path: Path, source: str) -> ChatTemplate:
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    template = load_template(tmp_path, None)
    assert template is not None
    return template


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON texts."""
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


# These fail on most conversations, in transformers too: they want tools or other roles.
RENDERS_LITTLE = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
}
OWN = [f"chat-templates/{file.name}" for file in sorted(located("chat-templates").iterdir())]


@pytest.mark.usefixtures("renders_here")
@pytest.mark.parametrize("name", [*OWN, *references("chat-templates/*.jinja")])
def test_render_every_template_equals_transformers(
    name: str, checkpoint: Path, transformers_tokenizer: PreTrainedTokenizerFast
) -> None:
    file = located(name)
    template = load_template(checkpoint, file)
    assert template is not None
    source = file.read_text(encoding="utf-8")
    rendered = 0
    for kind, conversation in CONVERSATIONS.items():
        expected = of_transformers(source, transformers_tokenizer.special_tokens_map, conversation)
        try:
            text = template.render(**conversation)
        except TemplateError:
            text = None
        assert text == expected, kind
        rendered += text is not None
    template.close()
    assert rendered > 6 or file.stem in RENDERS_LITTLE


def of_transformers(
    source: str, special: dict[str, str], conversation: dict[str, Any]
) -> str | None:
    """Return what transformers renders, or None if the template fails on all forms of calls."""
    arguments = {"add_generation_prompt": True, **conversation}
    # The server passes no null but that of a content.
    messages = [
        {k: v for k, v in m.items() if v is not None or k == "content"} if m is not CALLS else m
        for m in arguments.pop("messages")
    ]
    for content, has_text in ((None, False), ("", False), (None, True), ("", True)):
        calls = with_text_arguments(CALLS) if has_text else CALLS
        given = [{**calls, "content": content} if m is CALLS else m for m in messages]
        with contextlib.suppress(Exception):
            [expected], _ = render_jinja_template(
                [given], chat_template=source, **special, **arguments
            )
            return expected
    return None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ 'é' | tojson(ensure_ascii=True) }}{{ nothing }}{{ nothing is defined }}",
        "{{ documents is defined }}{{ tools is none }}{{ add_generation_prompt }}{{ bos_token }}",
        "{%- for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}\n\n",
        "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{{ loop.index }}"
        "{% endgeneration %}{{ x }}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}"
        "{{ ns.a }}{{ dict(a=1, b=dict([(1, 2)])) }}{{ range(3) | list }}",
        "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}{{ messages[1].tool_calls }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_render_template_details_equal_transformers(
    tmp_path: Path, source: str, transformers_tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = CONVERSATIONS["turns"]["messages"]
    expected = transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    tokens = {"bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert template_of(tmp_path, source).render(messages) == expected


def test_render_raise_exception_raises_its_message(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(TemplateError, match=r"^Roles must alternate\.$"):
        template.render([USER])


def test_render_empty_template_is_empty(tmp_path: Path) -> None:
    assert template_of(tmp_path, "").render([USER]) == ""


def test_render_does_not_change_the_messages(tmp_path: Path) -> None:
    message = {"role": "user", "content": None, "reasoning": "r"}
    template = template_of(tmp_path, "{{ messages }}")
    assert template.render([message]) == str(
        [
            {
                "thinking": "r",
                "role": "user",
                "content": None,
                "reasoning": "r",
                "reasoning_content": "r",
            }
        ]
    )
    assert message == {"role": "user", "content": None, "reasoning": "r"}


def test_render_arguments_cannot_replace_builtins(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ range(2) | list }}{{ tools }}{{ extra }}")
    assert template.render([USER], range="no", extra=3) == "[0, 1]None3"


@pytest.mark.parametrize(
    ("thinking", "plain"),
    [("hermes", "plain"), reference("Qwen-Qwen3-0.6B", "google-gemma-2-2b-it")],
)
def test_variables_are_the_names_a_template_reads(
    checkpoint: Path, thinking: str, plain: str
) -> None:
    def variables(name: str) -> frozenset[str]:
        file = located(f"chat-templates/{name}.jinja")
        template = load_template(checkpoint, file)
        assert template is not None
        return template.variables

    assert {"tools", "enable_thinking"} <= variables(thinking)
    assert "tools" not in variables(plain)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates get only 0.3 s."""
    monkeypatch.setattr(render_pool, "LIMITS", render_pool.LIMITS._replace(seconds=0.3))


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ range.__closure__[0].cell_contents }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "{{ '%s' | format(messages.__class__.__mro__) }}",
    "{% set ns = namespace(__call__='{0.__class__}'.format) %}{{ ns(1) }}",
    "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
    "{{ (messages | map('string')).gi_frame.f_globals }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].clear() }}",
    "{{ dict.update(messages[0], role='system') }}",
    "{{ lipsum() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ lipsum.__globals__['os'] }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_render_sandbox_escape_raises(tmp_path: Path, source: str) -> None:
    with pytest.raises(TemplateError):
        template_of(tmp_path, source).render([dict(USER)])


@pytest.mark.variants(6)
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{{ i }} {% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(1000000) | list }}",
        "{{ messages[0].content * 7 }}",
        "{{ messages[0].content * 3000000000 }}",
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(n=3) %}{% for c in 'x' * 99 %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 999999 if not messages[0].content.count('y') > 9 and 0 %}{% endfor %}",
        "{% for a in 'xx' * 9999 recursive %}{{ loop('xx' * 9999) }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(40) }}",
        "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{% endcall %}{% call m(n - 1) %}{% endcall %}"
        "{% endif %}{% endmacro %}{{ m(40) }}",
        "{% set ns = namespace(n=0) %}{% block a %}{% set ns.n = ns.n + 1 %}{% if ns.n % 40 %}"
        "{{ self.a() }}{{ self.a() }}{% endif %}{% set ns.n = ns.n - 1 %}{% endblock %}",
    ],
)
@pytest.mark.usefixtures("short")
def test_render_runaway_template_raises(tmp_path: Path, source: str) -> None:
    """`tests/faults/test_templates.py` measures time and memory, with more templates."""
    with pytest.raises(TemplateError):
        template_of(tmp_path, source).render([{"role": "user", "content": "x" * 50_000}])


def test_render_lone_surrogate_raises(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="lone surrogate"):
        template_of(tmp_path, "{{ '\\ud800' }}").render([USER])


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_render_after_a_runaway_template_works(tmp_path: Path) -> None:
    """The process that was killed is replaced, and so is one that died while it was idle."""
    source = "{% if messages[0].content == 'slow' %}{{ 9 ** (9 ** 9) }}{% endif %}fine"
    template = template_of(tmp_path, source)
    for _ in range(3):
        with pytest.raises(TemplateError, match=r"took more than 0\.3 s"):
            template.render([{"role": "user", "content": "slow"}])
        assert template.render([USER]) == "fine"
    for child in psutil.Process().children():
        if "server.text.template_sandbox" in child.cmdline():
            child.kill()
            child.wait(10)
    assert template.render([USER]) == "fine"


async def test_render_async_runs_two_at_a_time(tmp_path: Path) -> None:
    source = "{% for i in range(messages | length * 5000) %}{{ 'x' }}{% endfor %}"
    template = template_of(tmp_path, source)
    texts = await asyncio.gather(*(template.render_async([USER] * n) for n in (1, 2, 3, 4) * 5))
    assert [len(text) for text in texts] == [5000, 10_000, 15_000, 20_000] * 5


# It looks for the result of each call in all messages, as published ones do.
QUADRATIC = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% for r in messages %}"
    "{% if r.tool_call_id == call.id %}{{ r.content }}{% endif %}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
COMMAND_R7B = "chat-templates/CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja"


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", ["own", reference(COMMAND_R7B)])
def test_render_template_quadratic_in_messages_raises_within_time_limit(
    tmp_path: Path, name: str
) -> None:
    """Without the time limit, a request of 400 KB would take a minute with this template."""
    source = QUADRATIC if name == "own" else located(name).read_text()
    template = template_of(tmp_path, source)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    template.render([USER, *turn * 20])
    with pytest.raises(TemplateError, match=r"took more than 1\.5 s"):
        template.render([USER, *turn * 2000])


def test_render_long_conversation_is_complete(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    messages = [{"role": "user", "content": "word " * 1000}] * 1000
    assert len(template.render(messages)) == 5_002_000


def test_from_folder_uses_first_template_source(tmp_path: Path) -> None:
    def render(override: Path | None = None) -> str | None:
        template = load_template(tmp_path, override)
        return template and template.render([USER])

    config = tmp_path / "tokenizer_config.json"
    assert render() is None
    config.write_text("{}")
    assert render() is None
    config.write_text(json.dumps({"chat_template": "config {{ eos_token }}", "eos_token": "</s>"}))
    assert render() == "config </s>"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert render() == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert render() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert render() == "jinja"
    (tmp_path / "mine.jinja").write_text("mine")
    assert render(tmp_path / "mine.jinja") == "mine"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("chat_template.jinja", "a\n{% if %}", r"chat_template\.jinja is broken at line 2"),
        ("chat_template.jinja", "{{ 1 | nofilter }}", r"chat_template\.jinja is broken .*nofilter"),
        ("chat_template.jinja", "{{ '" + chr(0xD800) + "' }}", "Cannot read the chat template"),
        ("chat_template.jinja", "{% for a in b %}" * 30 + "{% endfor %}" * 30, r"\(SyntaxError\)"),
        ("chat_template.jinja", "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "RecursionError"),
        ("chat_template.jinja", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("chat_template.jinja", "{{ " + "+".join("1" * 50_000) + " }}", "RecursionError"),
        ("chat_template.jinja", "{{ " + "9" * 10_000 + " }}", r"\(ValueError\)"),
        ("chat_template.jinja", b"\xff\xfe", r"Cannot read the chat template .*\.jinja"),
        ("tokenizer_config.json", '{"chat_template": "{{"}', r"tokenizer_config\.json is broken"),
        ("tokenizer_config.json", '{"chat_template": 5}', r"tokenizer_config\.json: chat_template"),
        ("chat_template.json", '{"chat_template": [{"name": "x", "template": ""}]}', "default"),
    ],
)
def test_from_folder_broken_template_raises_error_naming_file(
    tmp_path: Path, name: str, content: str | bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(
        content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    )
    with pytest.raises(ConfigError, match=problem):
        load_template(tmp_path, None)


def test_from_folder_missing_override_raises_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        load_template(tmp_path, tmp_path / "nowhere.jinja")


def test_from_folder_template_failing_on_some_messages_loads(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ messages[0].content.nothing.more }}")
    with pytest.raises(TemplateError, match="nothing"):
        template.render([USER])
