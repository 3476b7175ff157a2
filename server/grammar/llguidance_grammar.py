"""The grammar of an answer, in the format that the engine compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from engine.protocol.generate import Grammar
from engine.protocol.thoughts import limited_source
from server.grammar.structural_tag import StructuralTagError, StructuralTagGrammar
from server.http.errors import invalid, unsupported
from server.text import exact_json
from server.text.guided_schema import guided
from server.text.tokenizer import Tokenizer
from server.text.wanted_grammar import JSON_OPTIONS, WantedGrammar

# llguidance translates GBNF in Python, in a time that grows with the square of the rules.
MAX_GBNF_RULES = 128
MAX_GBNF_CHARS = 16 << 10


def grammar_of(tokenizer: Tokenizer, wanted: WantedGrammar) -> Grammar:
    """Return the engine's grammar. Raises a 400 ApiError if it cannot be written in its format."""
    ends = tokenizer.eos_token_ids
    if not ends:
        raise invalid(wanted.param, "This model has no end token, which structured output needs.")
    try:
        source = _source(wanted, tokenizer.added_ids)
        if wanted.around:
            source = _within(source, wanted.around)
        if wanted.thoughts:
            source = limited_source(wanted.thoughts, source)
    except StructuralTagError as error:
        param = f"{wanted.param}.{error.path}".rstrip(".")
        refusal = unsupported if error.is_unsupported else invalid
        raise refusal(param, f"{param}: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise invalid(wanted.param, f"{wanted.param} cannot be read: {error}.") from None
    return Grammar(source, tuple(ends), wanted.param)


def _source(wanted: WantedGrammar, tokens: Mapping[str, int]) -> str:
    from llguidance import LLMatcher, grammar_from  # takes 20 ms, and few servers need it

    match wanted.kind:
        case "json_schema":
            return _json_source(wanted)
        case "regex":
            return LLMatcher.grammar_from_regex(wanted.value)
        case "choice":
            lark = grammar_from("choice", orjson.dumps(wanted.value).decode())
        case "grammar":
            _check_gbnf(wanted.value)
            lark = grammar_from("grammar", wanted.value)
        case "structural_tag":
            return _structural_source(wanted, tokens)
        case "lark":
            lark = wanted.value
        case "free":
            return ""
    return orjson.dumps({"grammars": [{"lark_grammar": lark}]}).decode()


def _check_gbnf(text: str) -> None:
    """Raise ValueError if a GBNF grammar would take long to translate."""
    rules = text.count("::=")
    if rules > MAX_GBNF_RULES:
        raise ValueError(f"{rules} rules of GBNF, and the limit is {MAX_GBNF_RULES}")
    if rules and len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"{len(text)} characters of GBNF, and the limit is {MAX_GBNF_CHARS}")


def _within(source: str, around: str) -> str:
    """Return the grammar `around`, in which the one of `source` is `@answer`."""
    answer, *others = exact_json.loads(source)["grammars"]
    grammars = [{"lark_grammar": around}, {**answer, "name": "answer"}, *others]
    return exact_json.dumps({"grammars": grammars}).decode()


def _structural_source(wanted: WantedGrammar, tokens: Mapping[str, int]) -> str:
    tag = StructuralTagGrammar(tokens, _json_options(wanted), translated)
    grammars = [{"lark_grammar": tag.text(wanted.value)}]
    for name, lark in tag.inner.items():
        grammars.append({"name": name, "lark_grammar": lark})
    return orjson.dumps({"grammars": grammars}).decode()


def translated(kind: Literal["regex", "grammar"], text: str) -> str:
    """Return the Lark grammar of a regular expression, or of a GBNF or Lark grammar."""
    source = _source(WantedGrammar("", kind, text), {})
    return str(orjson.loads(source)["grammars"][0]["lark_grammar"])


def _json_source(wanted: WantedGrammar) -> str:
    if not isinstance(wanted.value, dict):
        raise ValueError("a JSON schema is an object")
    schema = guided(wanted.value, _json_options(wanted))
    return exact_json.dumps({"grammars": [{"json_schema": schema}]}).decode()


def _json_options(wanted: WantedGrammar) -> dict[str, Any]:
    if wanted.whitespace:
        return {"whitespace_pattern": wanted.whitespace}
    if wanted.whitespace == "":
        return {"whitespace_flexible": False}
    return JSON_OPTIONS
