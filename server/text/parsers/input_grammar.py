"""The grammar of a call of a custom tool whose input a grammar holds (`input_form.py`).

The client's grammar is nested in the grammar of the call. It is read token by token, so that it can
neither leave its place nor ask for tokens that are no text. The tokens are those of llguidance's
Lark dialect (its docs/syntax.md); what they mean is left to llguidance.
"""

from __future__ import annotations

import json
import re

from server.text.parsers.formats import (
    CallFormat,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)
from server.text.parsers.input_form import end_mark_of, lead_of
from server.text.parsers.rules import NUMBER, GrammarRules
from server.text.tools import Tool

MAX_DEFINITION = 64 << 10  # characters
TOKENS = re.compile(
    r"""(?P<space>\s+ | (?:\#|//)[^\n]*)
    | (?P<text>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"i?)
    | (?P<regex>/(?:\\[\s\S]|[^/\\])+/[imslux]*)
    | (?P<special><[^<>\s]+>)
    | (?P<option>%llguidance)
    | (?P<other>@?[A-Za-z0-9_-]+|[\s\S])""",
    re.VERBOSE,
)
PART = re.compile(r"\\.|[^\\]|\\$", re.DOTALL)  # of a regular expression
LINE_ENDS = {"\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}
ESCAPED = {"/": "\\/", **LINE_ENDS}  # where such an expression is a token


def held_call(rules: GrammarRules, format: CallFormat, tool: Tool, opened: str) -> str:
    """Return a call, which is the last one of its answer. `opened` is a mark already written.

    Raises ValueError, which names the tool and what its grammar has that cannot be followed.
    """
    section, opening = format.section_open, format.open
    if section:
        section = _after(section, opened)
    else:
        opening = _after(opening, opened)
    parts = [rules.literal(section)]
    if isinstance(format.body, JsonCall) and format.body.is_list:
        parts.append('"["')
    parts += [rules.literal(opening), _head(rules, format, tool)]
    end = end_mark_of(format, rules.marks)
    closing = f" (<[{rules.marks.ids[end]}]>)?" if end else ""
    return f"{' '.join(parts)} {_input(rules, tool)}{closing}"


def _after(text: str, opened: str) -> str:
    """Return the rest of a text whose first mark is already written."""
    return text.lstrip().removeprefix(opened) if opened else text


def held_message(rules: GrammarRules, format: ChannelFormat, tool: Tool) -> str:
    """Return a call in Harmony's format, which is the last one of its answer."""
    header = f"{format.channel}commentary to=functions.{tool.name}{format.message}"
    return f"{rules.literal(header)} {_input(rules, tool)}"


def _head(rules: GrammarRules, format: CallFormat, tool: Tool) -> str:
    """Return a call from the name to the input.

    Its texts end where those of other calls do. Otherwise a lexeme that goes on in one call hides
    the end of another one's.
    """
    lead = lead_of(format)
    match format.body:
        case NamedCall() as body:
            return named_opening(rules, body, tool)
        case JsonCall(name=name_key, id=id_key):
            name = json.dumps(tool.name) + lead
            if name_key:
                name = f"{json.dumps(name_key)}: {name}"
            if id_key is None:
                return rules.literal("{" + name)
            opening = rules.literal(f'{{{json.dumps(id_key)}: "')
            return f"{opening} {NUMBER} {rules.literal(f'{chr(34)}, {name}')}"
        case TaggedCall(name_end="", key_open=key_open):
            return f"{rules.literal(tool.name)} {rules.literal(key_open.rstrip() + lead)}"
        case TaggedCall(name_end=end) | LinesCall(name_end=end):
            name = tool.name + end
            return f"{rules.literal(name)} {rules.literal(lead[len(end) - len(end.rstrip()) :])}"
        case PythonCall():
            return rules.literal(f"[{tool.name}({lead}")
        case GemmaCall():
            return f"{rules.literal(tool.name + '{')} {rules.literal(lead)}"


def named_opening(rules: GrammarRules, body: NamedCall, tool: Tool) -> str:
    """Return the name and the separator before the arguments."""
    before, found, after = body.written.replace("{name}", tool.name).partition("{index}")
    name = rules.literal(before)
    if found:
        name = f"{name} {NUMBER} {rules.literal(after)}"
    return f"{name} {rules.literal(body.separator)}"


def _input(rules: GrammarRules, tool: Tool) -> str:
    """Return the rule of a tool's input."""
    assert tool.input is not None
    definition = tool.input.definition
    try:
        if len(definition) > MAX_DEFINITION:
            raise ValueError(f"it has over {MAX_DEFINITION} characters")
        if tool.input.syntax == "regex":
            definition = lark_of_regex(definition)
        else:
            check_lark(definition)
    except ValueError as error:
        raise ValueError(f"the grammar of the custom tool {tool.name!r}: {error}") from None
    return rules.add("input", f"%lark {{\n{definition}\n}}")


def lark_of_regex(pattern: str) -> str:
    """Return the grammar of the texts that match a regular expression as a whole."""
    parts = [ESCAPED.get(part, part) for part in PART.findall(pattern)]
    lark = f"start: /{''.join(parts)}/" if pattern else 'start: ""'
    check_lark(lark)
    return lark


def check_lark(lark: str) -> None:
    """Raise ValueError for a grammar that asks for tokens, or for grammars outside of it."""
    at = depth = 0
    while at < len(lark):
        token = TOKENS.match(lark, at)
        assert token is not None
        text = token.group()
        place = f"line {lark.count(chr(10), 0, at) + 1}"
        if token.lastgroup in ("special", "option") or text[0] == "@":
            raise ValueError(f"{place}: {text[:64]} is not supported in a tool's grammar")
        if text in ('"', "/"):
            what = "text" if text == '"' else "regular expression"
            raise ValueError(f"{place}: a {what} is not closed, or has an unknown escape")
        depth += {"{": 1, "}": -1}.get(text, 0)
        if depth < 0:
            raise ValueError(f"{place}: a brace closes nothing")
        at = token.end()
    if depth:
        raise ValueError("a brace is not closed")
