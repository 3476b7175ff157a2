"""Expressions of templates give what transformers' environment gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.text.template_sandbox import Renderer

CONTEXT: dict[str, Any] = {
    "n": 5,
    "f": 2.5,
    "s": "a,b,c",
    "l": [3, 1, 2],
    "d": {"b": 1, "a": [1, {"x": None}]},
    "messages": [{"role": "user", "content": "Hi <b> é"}],
}
EXPRESSIONS = """
{{ dict.fromkeys(['a', 'b'], 1) }}
{{ dict.fromkeys('ab') }}{{ d.fromkeys('xy') }}
{{ dict(a=1) }}{{ dict([('a', 1)], b=2) }}
{{ dict.keys(d) }}
{{ dict.update(d) }}
{{ d.items() | list }}{{ d.keys() }}{{ d.values() }}{{ d.copy() }}{{ d.get('z', 3) }}
{{ d.pop('b') }}
{{ d.setdefault('z', 1) }}
{{ l.append(1) }}
{{ l.sort() }}
{{ l.index(1) }}{{ l.count(1) }}{{ l.copy() }}{{ l + [4] }}{{ l[::-1] }}
{{ s.split(',', 1) }}{{ s.rsplit(',', maxsplit=1) }}{{ s.partition(',') }}{{ s.splitlines() }}
{{ s.upper().title() }}{{ s.strip('ac') }}{{ s.lstrip('a').rstrip('c') }}
{{ s.startswith(('x', 'a')) }}{{ s.removeprefix('a,').removesuffix(',c') }}
{{ s.replace(',', ';', 1) }}{{ s.find('b') }}{{ s.index('b') }}{{ s.count(',') }}
{{ s.center(11, '-') }}{{ s.ljust(9, '.') }}{{ '7'.zfill(3) }}{{ 'ß'.casefold() }}
{{ s.encode('utf-8') }}{{ s.encode().decode() }}
{{ 'a{}b{x}'.format(1, x=2) }}{{ '{0.real}'.format(n) }}{{ 'a{x}'.format_map({'x': 1}) }}
{{ '%s-%d' % ('a', 3) }}{{ 'ab'.isalpha() }}{{ ','.join(['a', 'b']) }}
{{ 'a'.translate({97: 'b'}) }}{{ 'abc'.maketrans('a', 'b') }}{{ 'a\tb'.expandtabs(4) }}
{{ n.bit_length() }}{{ n.to_bytes(2, 'big') }}{{ f.is_integer() }}{{ f.hex() }}{{ n.real }}
{{ range(3) | list }}{{ range(1, 10, 3) | list }}{{ range(100000) | length }}
{{ range(100001) | length }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}
{% set j = joiner(', ') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}
{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ ns['x'] }}{{ ns }}{{ ns.y is defined }}
{% set ns = namespace({'x': 1}) %}{{ ns.x }}{% set ns = namespace([('x', 1)], y=2) %}{{ ns.y }}
{% set ns = namespace(self=1, items=2) %}{{ ns.self }}{{ ns.items }}
{% set ns = namespace(_x=1) %}
{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}
{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% generation %}a{{ n }}{% endgeneration %}b
{% set z = 1 %}{% generation %}{% set z = 2 %}{{ z }}{% endgeneration %}{{ z }}
{% for x in l %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}
{% set ns = namespace(x=0) %}{% generation %}{% set ns.x = 1 %}{% endgeneration %}{{ ns.x }}
{{ strftime_now('%Y') | length }}
{{ raise_exception('no') }}
{{ d | tojson }}{{ 'é<' | tojson }}{{ messages[0].content | tojson }}
{{ d | tojson(indent=2) }}{{ d | tojson(indent='  ') }}{{ d | tojson(true, 2) }}
{{ 'é<' | tojson(ensure_ascii=true) }}{{ d | tojson(separators=(',', ':'), sort_keys=true) }}
{{ d | items | list }}{{ d | dictsort }}{{ d | list }}{{ d | pprint }}{{ d | xmlattr }}
{{ l | sort }}{{ l | sum }}{{ l | max }}{{ l | join('-') }}{{ l | batch(2) | list }}
{{ messages | map(attribute='role') | list }}{{ messages | groupby('role') | list | length }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ 'a b' | wordcount }}{{ 'a b' | urlencode }}{{ '<' | e }}{{ '<b>' | striptags }}
{{ 'x' | default('y') }}{{ zz | default('y') }}{{ none | default('y', true) }}{{ zz }}{{ d.zz }}
{{ zz.a }}
{{ 2.7 | round }}{{ '3' | int }}{{ -3 | abs }}{{ s | truncate(2, true, '') }}{{ s | indent(2) }}
{{ true }}{{ None }}{{ none is none }}{{ d is mapping }}{{ 1.0 is float }}{{ dict is callable }}
{% macro m(x, y=2) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=4) }}
{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}
{% filter upper %}a{% endfilter %}{% set x %}abc{% endset %}{{ x }}
{% with a=1 %}{{ a }}{% endwith %}
{% autoescape true %}{{ '<' }}{% endautoescape %}{% block b %}x{% endblock %}{{ self.b() }}
{% include 'x' %}
{% do l.append(1) %}
{{ s.__class__ }}
{{ dict.__class__ }}
{{ dict.fromkeys.__self__ }}
""".strip().splitlines()


def rendered(source: str) -> str | None:
    """Return the text, or None if the template does not compile or fails."""
    renderer = Renderer()
    if "variables" not in json.loads(renderer.handle(source.encode())):
        return None
    answer: dict[str, str] = json.loads(renderer.handle(json.dumps(CONTEXT).encode()))
    return answer.get("text")


def of_transformers(source: str) -> str | None:
    context = {name: value for name, value in CONTEXT.items() if name != "messages"}
    try:
        [text], _ = render_jinja_template([CONTEXT["messages"]], chat_template=source, **context)
    except Exception:  # of any kind: the template is a program
        return None
    return str(text)


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_expression_gives_what_transformers_gives(source: str) -> None:
    assert rendered(source) == of_transformers(source)


def test_expressions_mostly_give_a_text() -> None:
    assert sum(rendered(source) is not None for source in EXPRESSIONS) > 0.7 * len(EXPRESSIONS)


def test_memory_and_output_limits_hold_for_fromkeys() -> None:
    source = "{% for i in range(9) %}{{ dict.fromkeys(range(100000)) }}{% endfor %}"
    assert rendered(source) is None
