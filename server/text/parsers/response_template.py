"""Translate the `response_template` of a checkpoint to the formats of the parser.

It is the inverse of a chat template, as data in tokenizer_config.json. Source: docs/source/en/
chat_response_parsing.md of github.com/huggingface/transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.text.parsers.formats import (
    NO_OTHER_MARKS,
    AnyCallFormat,
    Body,
    CallFormat,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    OtherMarks,
    Reasoning,
    TaggedCall,
)
from server.text.parsers.patterns import PatternError, Piece, alternatives, texts

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
MAX_MARKS = 32  # of one field
HARMONY = ChannelFormat()
START = Piece("edge", "^")

Field = Mapping[str, Any]


class UntranslatableError(ValueError):
    """A field has no equivalent in the formats of the parser."""


@dataclass(frozen=True)
class TranslatedTemplate:
    """The formats of a response template. A part that is None must be found in another way."""

    calls: AnyCallFormat | None = None
    reasoning: Reasoning | None = None
    other: OtherMarks = NO_OTHER_MARKS
    problems: tuple[str, ...] = ()  # of fields that have no equivalent


NO_TEMPLATE = TranslatedTemplate()


def translated(template: object) -> TranslatedTemplate:
    """Return the formats of a response template, and why fields could not be translated."""
    if template is None:
        return NO_TEMPLATE
    fields = template.get("fields") if isinstance(template, dict) else None
    if not isinstance(template, dict) or not isinstance(fields, dict):
        return TranslatedTemplate(problems=("fields is not an object",))
    if template.get("version", 1) != 1:
        return TranslatedTemplate(problems=(f"version {template['version']!r:.20} is not known",))
    return _Translation().run(fields)


class _Translation:
    """Translates the fields of one template."""

    def __init__(self) -> None:
        self._calls: AnyCallFormat | None = None
        self._reasoning: Reasoning | None = None
        self._aliases: dict[str, tuple[str, ...]] = {}
        self._dropped: list[str] = []
        self._problems: list[str] = []

    def run(self, fields: Mapping[str, Any]) -> TranslatedTemplate:
        for name, spec in fields.items():
            try:
                self._take(name, spec)
            except (UntranslatableError, PatternError) as error:
                self._problems.append(f"field {name[:64]}: {error}")
        if isinstance(self._calls, ChannelFormat):  # its channels have content and reasoning
            return TranslatedTemplate(self._calls, None, problems=tuple(self._problems))
        other = OtherMarks(self._aliases, tuple(dict.fromkeys(self._dropped)))
        return TranslatedTemplate(self._calls, self._reasoning, other, tuple(self._problems))

    def _take(self, name: str, spec: Any) -> None:
        if not isinstance(spec, dict):
            raise UntranslatableError("is not an object")
        if name == "tool_calls":
            self._calls = self._tool_calls(spec)
        elif name in REASONING_FIELDS:
            self._reasoning = self._reasoning_of(spec)
        elif name == "content":
            self._content(spec)
        else:
            raise UntranslatableError("has no place in an answer")

    def _reasoning_of(self, spec: Field) -> Reasoning:
        _check_text(spec)
        forms = _forms(spec, "open")
        begins_answer = any(pieces == [START] for pieces in forms)  # as in (?:^|<think>)
        openings = [_only_text(pieces) for pieces in forms if texts(pieces)]
        closings = [_only_text(pieces) for pieces in _forms(spec, "close") if texts(pieces)]
        if not openings or not closings:
            raise UntranslatableError("has no open and close")
        self._add_alias(openings)
        self._add_alias(closings)
        return Reasoning(openings[0], closings[0], begins_answer)

    def _content(self, spec: Field) -> None:
        _check_text(spec)
        for side in ("open", "close"):
            for pieces in _forms(spec, side):
                self._dropped += [text for text in texts(pieces) if text.strip()]

    def _add_alias(self, marks: Sequence[str]) -> None:
        first, *others = marks
        if others:
            self._aliases[first] = tuple(others)

    # ---- tool calls ------------------------------------------------------------------------------

    def _tool_calls(self, spec: Field) -> AnyCallFormat:
        openings = _forms(spec, "open")
        opening = _longest(openings)
        marks = texts(opening)
        if not marks:
            raise UntranslatableError("has no open")
        self._add_openings(openings, marks)
        joined = "".join(marks)
        if HARMONY.channel in joined and HARMONY.message in joined:
            return HARMONY
        result = _Result(spec)
        closings = _forms(spec, "close")
        closing = texts(_longest(closings)) if closings else []
        if result.name_group is None:
            return self._format(_json_body(spec, result), _only_text(opening), closing, closings)
        before, after = _around_name(opening, result.name_group)
        body = _named_body(spec, result, after)
        if len(before) == 2:
            return self._sectioned(body, before, closing)
        if len(before) != 1:
            raise UntranslatableError("open has more than two marks before the name")
        return self._format(body, before[0], closing, closings)

    def _add_openings(self, openings: Sequence[Sequence[Piece]], marks: Sequence[str]) -> None:
        """Add the other forms of `open`: they lack the first mark, or are other texts for it."""
        others = [found for found in map(texts, openings) if found != marks]
        if len(marks) == 1 and all(len(found) == 1 for found in others):
            self._add_alias([marks[0], *(text for (text,) in others)])
        elif any(found != marks[-len(found) :] for found in others):
            raise UntranslatableError("open has forms that differ in more than one mark")

    def _format(
        self, body: Body, opening: str, closing: Sequence[str], closings: Sequence[Sequence[Piece]]
    ) -> CallFormat:
        close = closing[-1] if closing else ""
        others = [texts(pieces)[-1] for pieces in closings if texts(pieces)]
        if close:
            self._add_alias([close, *(text for text in others if text != close)])
        if isinstance(body, JsonCall) and body.is_list:
            return CallFormat("response_template", body, section_open=opening, section_close=close)
        return CallFormat("response_template", body, open=opening, close=close, separator="\n")

    def _sectioned(self, body: Body, before: Sequence[str], closing: Sequence[str]) -> CallFormat:
        """Return the format of calls with two marks before each, and one or two after it."""
        section_open, opening = before
        if not closing:
            raise UntranslatableError("has no close")
        section_close = closing[-1]
        return CallFormat(
            "response_template",
            body,
            open=opening,
            close=closing[0] if len(closing) > 1 else "",
            separator=f"{section_close}\n{section_open}",
            section_open=section_open,
            section_close=section_close,
            is_section_optional=True,
        )


@dataclass
class _Result:
    """Where the name and the arguments of a call come from, by the field's `transform`."""

    spec: Field
    name_group: str | None = field(init=False, default=None)  # of `open_pattern`
    name_key: str = field(init=False, default="name")  # of the JSON object
    arguments_key: str = field(init=False, default="arguments")

    def __post_init__(self) -> None:
        transform = self.spec.get("transform")
        function = transform.get("function") if isinstance(transform, dict) else None
        if function == "{content}":
            return
        if not isinstance(function, dict):
            raise UntranslatableError("transform makes no function")
        name, arguments = _placeholder(function, "name"), _placeholder(function, "arguments")
        if self.spec.get("transform_each"):
            self.name_key, self.arguments_key = name, arguments
        elif name.startswith("content.") and arguments.startswith("content."):
            self.name_key = name.removeprefix("content.")
            self.arguments_key = arguments.removeprefix("content.")
        elif arguments == "content":
            self.name_group = name
        else:
            raise UntranslatableError("transform takes the name and the arguments elsewhere")
        if "." in self.name_key + self.arguments_key:
            raise UntranslatableError("transform takes the name or the arguments from within")


def _placeholder(function: Field, key: str) -> str:
    value = function.get(key)
    if not isinstance(value, str) or value[:1] != "{" or value[-1:] != "}":
        raise UntranslatableError(f"transform has no placeholder for {key}")
    return value[1:-1]


def _json_body(spec: Field, result: _Result) -> JsonCall:
    if spec.get("content") != "json":
        raise UntranslatableError(f"content {spec.get('content', 'text')!r:.20} has no name")
    arguments = _arguments_of(spec, "content_args")
    if arguments.get("unquoted_keys") or arguments.get("string_delims"):
        raise UntranslatableError("content_args: calls are not JSON")
    is_list = bool(spec.get("transform_each"))
    return JsonCall(result.name_key, result.arguments_key, is_list=is_list)


def _named_body(spec: Field, result: _Result, after: Sequence[Piece]) -> Body:
    """Return the body of calls whose name is in `open_pattern`. `after` follows it there."""
    end = "".join(texts(after))
    if any(piece.kind in ("group", "any") for piece in after):
        raise UntranslatableError("open_pattern has other text after the name")
    arguments = _arguments_of(spec, "content_args")
    match spec.get("content"):
        case "json":
            return _named_json(arguments, end)
        case "xml-inline":
            return _tagged(arguments, end if end.strip() else "")
        case "kv-lines":
            if arguments.get("strip", True) is not True:
                raise UntranslatableError("content_args.strip is false")
            key_end = arguments.get("kv_sep", ":")
            line_end = arguments.get("line_sep", "\n")
            if not (isinstance(key_end, str) and key_end.strip()):
                raise UntranslatableError("content_args.kv_sep is blank")
            if not (isinstance(line_end, str) and line_end):
                raise UntranslatableError("content_args.line_sep is empty")
            return LinesCall(end if end.strip() else "\n", key_end, line_end)
    raise UntranslatableError(f"content {spec.get('content', 'text')!r:.20} has no arguments")


def _named_json(arguments: Field, end: str) -> Body:
    delimiters = arguments.get("string_delims")
    if delimiters or arguments.get("unquoted_keys"):
        match delimiters:
            case [[str(opening), str(closing)]] if opening == closing and not end.strip():
                return GemmaCall(opening)
        raise UntranslatableError("content_args: strings have other delimiters than one pair")
    if not end.strip():
        raise UntranslatableError("open_pattern has no mark between the name and the arguments")
    return NamedCall(end)


def _tagged(arguments: Field, name_end: str) -> TaggedCall:
    pattern = arguments.get("tag_pattern")
    if not isinstance(pattern, str):
        raise UntranslatableError("content_args.tag_pattern is no text")
    if arguments.get("merge_duplicates"):
        raise UntranslatableError("content_args.merge_duplicates is true")
    pieces = _longest(alternatives(pattern))
    kinds = [(piece.kind, piece.text) for piece in pieces]
    if ("group", "key") not in kinds or ("group", "value") not in kinds:
        raise UntranslatableError("content_args.tag_pattern has no key and value")
    key = kinds.index(("group", "key"))
    value = kinds.index(("group", "value"))
    openings, middle, closings = (
        texts(pieces[:key]),
        texts(pieces[key:value]),
        texts(pieces[value:]),
    )
    if len(openings) != 1 or len(middle) not in (1, 2) or len(closings) != 1:
        raise UntranslatableError("content_args.tag_pattern has other marks than those of one tag")
    # White space around a value is no part of it, if the pattern has it there.
    is_spaced = any(piece.kind == "space" for piece in pieces[value:])
    newline = "\n" if is_spaced else ""
    return TaggedCall(
        name_end,
        key_open=openings[0],
        key_close=middle[0],
        value_close=f"{newline}{closings[0].strip()}\n",
        value_open=middle[1] if len(middle) > 1 else "",
    )


# ---- delimiters ----------------------------------------------------------------------------------


def _forms(spec: Field, side: str) -> list[list[Piece]]:
    """Return the forms of `open` or `close`. Raises UntranslatableError and PatternError."""
    literal, pattern = spec.get(side), spec.get(f"{side}_pattern")
    if isinstance(pattern, str):
        try:
            return alternatives(pattern)
        except PatternError as error:
            raise UntranslatableError(f"{side}_pattern: {error}") from error
    if literal is None and pattern is None:
        return []
    literals = [literal] if isinstance(literal, str) else literal
    if not isinstance(literals, list) or not 0 < len(literals) <= MAX_MARKS:
        raise UntranslatableError(f"{side} is no text and no list of texts")
    if not all(isinstance(text, str) and text.strip() for text in literals):
        raise UntranslatableError(f"{side} has a blank text")
    return [[Piece("text", text)] for text in literals]


def _longest(forms: Sequence[list[Piece]]) -> list[Piece]:
    """Return the form with the most parts; the others are without parts that are optional."""
    return max(forms, key=len, default=[])


def _only_text(pieces: Sequence[Piece]) -> str:
    found = texts(pieces)
    if len(found) != 1 or any(piece.kind in ("any", "group") for piece in pieces):
        raise UntranslatableError("a delimiter is more than one text")
    return found[0]


def _around_name(pieces: Sequence[Piece], group: str) -> tuple[list[str], Sequence[Piece]]:
    """Return the texts before the name, and what follows it."""
    named = Piece("group", group)
    if named not in pieces:
        raise UntranslatableError("open_pattern has no group for the name")
    at = pieces.index(named)
    before = pieces[:at]
    if any(piece.kind in ("any", "group") for piece in before):
        raise UntranslatableError("open_pattern has other text before the name")
    return texts(before), pieces[at + 1 :]


def _arguments_of(spec: Field, key: str) -> Field:
    arguments = spec.get(key, {})
    if not isinstance(arguments, dict):
        raise UntranslatableError(f"{key} is not an object")
    return arguments


def _check_text(spec: Field) -> None:
    if spec.get("content", "text") != "text" or spec.get("transform") is not None:
        raise UntranslatableError("is no plain text")
