"""Structural tags: answers of fixed texts, free text and constrained parts, as vLLM takes them.

The format is that of XGrammar (github.com/mlc-ai/xgrammar, docs: Structural Tag Usage). It is
written as a grammar of llguidance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from server.text.marks import Marks
from server.text.parsers.rules import GrammarRules

MAX_PARTS = 1024  # of one structural tag
MAX_DEPTH = 32
MAX_REPEATS = 4096
ALTERNATIVE = " | "

Node = dict[str, Any]
TranslatedKind = Literal["regex", "grammar"]
# One of these texts ends a text of any length; if there are none, the end of the answer does.
# None: such a text may not occur here, because another part follows.
Ends = tuple[str, ...] | None
END_OF_ANSWER: Ends = ()


class StructuralTagError(ValueError):
    """A part of a structural tag that cannot be followed. `path` leads to it from the tag."""

    def __init__(self, path: str, message: str, *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.is_unsupported = is_unsupported


def of_structures(tag: Mapping[str, Any]) -> Node:
    """Return the format of an older structural tag, which has `structures` and `triggers`."""
    tags = []
    for structure in _list_of(tag, "structures", "", dict):
        schema = structure.get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({**structure, "content": content})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def place_in_structures(path: str) -> str:
    """Return where a part of `of_structures` is in the older structural tag."""
    path = path.removeprefix("format.").replace("tags.", "structures.", 1)
    return path.replace(".content.json_schema", ".schema")


class StructuralTagGrammar:
    """Writes the grammar of one structural tag.

    `translate` returns the Lark grammar of a regular expression ("regex") or of another grammar
    ("grammar"). These are grammars of their own, by name in `inner`.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        json_options: Mapping[str, Any],
        translate: Callable[[TranslatedKind, str], str],
    ) -> None:
        """`tokens` are the tokens that are no parts of words, by text."""
        self.inner: dict[str, str] = {}
        self._tokens = tokens
        self._json_options = json_options
        self._translate = translate
        self._parts = 0
        self._writers: dict[str, Callable[[Node, str, Ends], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "star": self._star,
            "plus": self._plus,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def text(self, tag: Mapping[str, Any]) -> str:
        """Return the Lark grammar. Raises StructuralTagError, or ValueError of `translate`."""
        is_older = "structures" in tag and tag.get("format") is None
        node = of_structures(tag) if is_older else tag.get("format")
        texts = _texts(node)
        used = {token: i for token, i in self._tokens.items() if any(token in t for t in texts)}
        self._rules = GrammarRules(Marks(used), self._json_options)
        try:
            return self._rules.text(self._part(node, "format", END_OF_ANSWER))
        except StructuralTagError as error:
            if is_older:
                error.path = place_in_structures(error.path)
            raise

    def _part(self, node: Any, path: str, ends: Ends) -> str:
        """Return the rule of a part. One that has no end of its own includes one of `ends`."""
        self._parts += 1
        if self._parts > MAX_PARTS or path.count(".") > 2 * MAX_DEPTH:
            raise StructuralTagError(path, f"more than {MAX_PARTS} parts, or {MAX_DEPTH} levels")
        if not isinstance(node, dict):
            raise StructuralTagError(path, "a part is an object")
        kind = node.get("type")
        writer = self._writers.get(kind) if isinstance(kind, str) else None
        if writer is None:
            known = ", ".join(self._writers)
            message = f"`type` must be one of {known}, not {str(kind)[:64]!r}"
            raise StructuralTagError(path, message, is_unsupported=True)
        return writer(node, path, ends)

    # ---- parts that end themselves -----------------------------------------------------------

    def _const_string(self, node: Node, path: str, ends: Ends) -> str:
        return self._ended(self._rules.literal(_text(node, "value", path)), ends)

    def _json_schema(self, node: Node, path: str, ends: Ends) -> str:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise StructuralTagError(f"{path}.json_schema", "a JSON schema is an object")
        _only(node, path, style="json", any_order=False)
        return self._ended(self._rules.json(schema), ends)

    def _regex(self, node: Node, path: str, ends: Ends) -> str:
        _only(node, path, excludes=[])
        return self._ended(self._translated("regex", _text(node, "pattern", path)), ends)

    def _grammar(self, node: Node, path: str, ends: Ends) -> str:
        return self._ended(self._translated("grammar", _text(node, "grammar", path)), ends)

    def _translated(self, kind: TranslatedKind, text: str) -> str:
        name = f"part{len(self.inner)}"
        self.inner[name] = self._translate(kind, text)
        return f"@{name}"

    def _optional(self, node: Node, path: str, ends: Ends) -> str:
        return self._ended(f"{self._content(node, path)}?", ends)

    def _star(self, node: Node, path: str, ends: Ends) -> str:
        return self._ended(f"{self._content(node, path)}*", ends)

    def _plus(self, node: Node, path: str, ends: Ends) -> str:
        return self._ended(f"{self._content(node, path)}+", ends)

    def _repeat(self, node: Node, path: str, ends: Ends) -> str:
        least = _count(node, "min", path)
        most = None if node.get("max") == -1 else _count(node, "max", path)
        if most is not None and least > most:
            raise StructuralTagError(f"{path}.min", "is larger than max")
        times = f"{{{least},{'' if most is None else most}}}"
        return self._ended(f"{self._content(node, path)}{times}", ends)

    def _content(self, node: Node, path: str) -> str:
        return f"({self._part(node.get('content'), f'{path}.content', None)})"

    def _ended(self, rule: str, ends: Ends) -> str:
        return f"{rule} {self._any_of(ends)}" if ends else rule

    def _any_of(self, texts: Sequence[str]) -> str:
        return f"({ALTERNATIVE.join(map(self._rules.literal, texts))})"

    # ---- parts of others ---------------------------------------------------------------------

    def _sequence(self, node: Node, path: str, ends: Ends) -> str:
        elements = _list_of(node, "elements", path, dict)
        last = len(elements) - 1
        rules = []
        for index, element in enumerate(elements):
            inner_ends = ends if index == last else None
            rules.append(f"({self._part(element, f'{path}.elements.{index}', inner_ends)})")
        return " ".join(rules)

    def _or(self, node: Node, path: str, ends: Ends) -> str:
        elements = _list_of(node, "elements", path, dict)
        rules = []
        for index, element in enumerate(elements):
            rules.append(f"({self._part(element, f'{path}.elements.{index}', ends)})")
        return f"({ALTERNATIVE.join(rules)})"

    def _tag(self, node: Node, path: str, ends: Ends) -> str:
        opening = self._rules.literal(_text(node, "begin", path, may_be_empty=True))
        return self._ended(f"{opening} {self._after_begin(node, path)}", ends)

    def _after_begin(self, node: Node, path: str) -> str:
        content = self._part(node.get("content"), f"{path}.content", _ends_of(node, path))
        return f"({content})"

    # ---- parts with text of any length -------------------------------------------------------

    def _any_text(self, node: Node, path: str, ends: Ends) -> str:
        _only(node, path, max_tokens=None, max_chars=None)
        excluded = _list_of(node, "excludes", path, str) if node.get("excludes") else []
        return self._free_text(excluded, path, ends)

    def _free_text(self, excluded: Sequence[str], path: str, ends: Ends) -> str:
        if ends is None:
            message = "text of any length must be the last part, or the content of a tag"
            raise StructuralTagError(path, message, is_unsupported=True)
        if not ends:
            return f"{self._rules.text_without(*excluded)}?"
        kept = [text for text in excluded if text not in ends]
        return f"({ALTERNATIVE.join(self._rules.until(end, *kept) for end in ends)})"

    def _triggered_tags(self, node: Node, path: str, ends: Ends) -> str:
        _only(node, path, excludes=[])
        triggers = _list_of(node, "triggers", path, str)
        tags = _list_of(node, "tags", path, dict)
        first, behind_text = [], []
        for index, tag in enumerate(tags):
            inside = f"{path}.tags.{index}"
            rule = self._rules.add("tag", self._after_begin(tag, inside))
            begin = _text(tag, "begin", inside)
            first.append(f"{self._rules.literal(begin)} {rule}")
            behind_text.append(f"{self._up_to(begin, triggers, inside)} {rule}")
        opening = self._rules.add("first", ALTERNATIVE.join(first))
        if node.get("stop_after_first"):
            only = self._ended(opening, ends)
            if node.get("at_least_one"):
                return only
            later = self._ended(f"({ALTERNATIVE.join(behind_text)})", ends)
            return f"({later} | {self._free_text(triggers, path, ends)})"
        tail = self._free_text(triggers, path, ends)
        following = f"({ALTERNATIVE.join(behind_text)})* {tail}"
        return f"{opening} {following}" if node.get("at_least_one") else following

    def _up_to(self, begin: str, triggers: Sequence[str], path: str) -> str:
        """Return any text up to the trigger of a tag, and the text that begins the tag."""
        found = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(found) != 1:
            message = f"begins with {len(found)} of the triggers, and must begin with one"
            raise StructuralTagError(f"{path}.begin", message)
        if self._rules.is_token(begin):
            return f"{self._rules.text_without(*triggers)}? {self._rules.literal(begin)}"
        rest = begin.removeprefix(found[0])
        return f"{self._rules.until(found[0])} {self._rules.literal(rest)}"

    def _tags_with_separator(self, node: Node, path: str, ends: Ends) -> str:
        rules = []
        for index, tag in enumerate(_list_of(node, "tags", path, dict)):
            rules.append(f"({self._tag(tag, f'{path}.tags.{index}', None)})")
        one = self._rules.add("tag", ALTERNATIVE.join(rules))
        separator = self._rules.literal(_text(node, "separator", path, may_be_empty=True))
        rule = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._ended(rule if node.get("at_least_one") else f"({rule})?", ends)


def _ends_of(tag: Node, path: str) -> tuple[str, ...]:
    """Return the texts that end a tag."""
    end = tag.get("end")
    given = end if isinstance(end, list) and end else [end]
    ends = [text for text in given if isinstance(text, str)]
    if len(ends) < len(given):
        message = "must be a text or a list of texts"
        raise StructuralTagError(f"{path}.end", message, is_unsupported=isinstance(end, dict))
    if "" in ends and len(ends) > 1:
        raise StructuralTagError(f"{path}.end", "one of several texts must not be empty")
    return tuple(text for text in ends if text)


def _text(node: Node, name: str, path: str, *, may_be_empty: bool = False) -> str:
    value = node.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        message = "must be a text"
        where = f"{path}.{name}".lstrip(".")
        raise StructuralTagError(where, message, is_unsupported=isinstance(value, dict))
    return value


def _list_of(node: Mapping[str, Any], name: str, path: str, kind: type) -> list[Any]:
    value = node.get(name)
    where = f"{path}.{name}".lstrip(".")
    if not isinstance(value, list) or not value:
        raise StructuralTagError(where, "must be a list that is not empty")
    if len(value) > MAX_PARTS:
        raise StructuralTagError(where, f"may have at most {MAX_PARTS} items, not {len(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, kind) or item == "":
            expected = "an object" if kind is dict else "a text"
            raise StructuralTagError(f"{where}.{index}", f"must be {expected}")
    return value


def _only(node: Node, path: str, **supported: Any) -> None:
    """Raise StructuralTagError if a member has another value than the supported one."""
    for name, value in supported.items():
        given = node.get(name)
        if given is not None and given != value:
            message = f"only {value!r} is supported"
            raise StructuralTagError(f"{path}.{name}", message, is_unsupported=True)


def _count(node: Node, name: str, path: str) -> int:
    value = node.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_REPEATS:
        message = f"must be an integer from 0 to {MAX_REPEATS}"
        raise StructuralTagError(f"{path}.{name}", message)
    return value


def _texts(node: Any) -> list[str]:
    """Return all texts inside a part."""
    found = []
    unread = [node]
    while unread:
        value = unread.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list):
            unread.extend(value)
        elif isinstance(value, dict):
            unread.extend(value.values())
    return found
