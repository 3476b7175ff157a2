"""WantedGrammar: the grammar that a request asks for, as it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "lark", "free"]
# Between the parts of a JSON text. Without a limit some models write spaces until they are cut.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE}  # of llguidance


@dataclass(frozen=True)
class WantedGrammar:
    """The grammar that a request asks for. `param` names its field, for errors."""

    param: str
    kind: GrammarKind
    # A JSON schema, a regular expression, a list of texts, a grammar or a structural tag; None if
    # it is free.
    value: Any
    whitespace: str | None = None  # a regular expression; empty: none is allowed
    # A Lark grammar of the whole answer, in which this one is `@answer`. "": this one is all of it.
    around: str = ""
    # The limit of the answer's thoughts, in the form of `engine.protocol.thoughts`; "": none.
    thoughts: str = ""

    @property
    def holds_end(self) -> bool:
        """Whether the answer ends where the grammar does."""
        return self.kind != "free"
