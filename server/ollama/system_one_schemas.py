"""Body of /v1/systemone: questions about one state, with the options of each.

The shapes are those of Ollama's Python client 0.6.3 (`ollama/_types.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, field_validator, model_validator

from server.api.openai.schemas.fields import by_type
from server.http.body import MAX_TEXT, Body, Part, Text, failure, few, small
from server.text import exact_json

MAX_QUESTIONS = 64
MAX_OPTIONS = 52  # of a question: each has a letter
# A text, or JSON that the model reads as its text.
Content = Annotated[
    str | dict[str, Any] | Annotated[list[Any], Field(max_length=MAX_TEXT)],
    BeforeValidator(partial(small, most=MAX_TEXT)),
]


@dataclass(frozen=True)
class Option:
    """One of the answers to a question. `key` names it in the response."""

    key: str
    text: str


def text_of(content: Any) -> str:
    """Return a text, or JSON as its text."""
    return content if isinstance(content, str) else exact_json.dumps(content).decode()


class ChoiceQuestion(Part):
    """Which option is right."""

    type: Literal["choice"]
    instructions: Content
    """The question."""
    criteria: Annotated[dict[str, Text | None], BeforeValidator(partial(few, most=MAX_OPTIONS))]
    """The options, with a description or null."""

    @field_validator("criteria")
    @classmethod
    def _not_empty(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not value:
            raise failure("invalid", "needs an option")
        return value

    def answers(self) -> list[Option]:
        return [
            Option(key, f"{key}: {text}" if text else key) for key, text in self.criteria.items()
        ]


class NoulQuestion(Part):
    """Whether something is true."""

    type: Literal["noul"]
    instructions: Content
    """The question."""
    criteria: Annotated[dict[Literal["false", "true"], Text], Field(max_length=2)] | None = None
    """The meanings of true and false."""

    def answers(self) -> list[Option]:
        given = self.criteria or {}
        return [
            Option(key, f"{key}: {given[key]}" if key in given else key)
            for key in ("false", "true")
        ]


class ScoreQuestion(Part):
    """How high something is on a scale."""

    type: Literal["score"]
    instructions: Content
    """The question."""
    criteria: Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_OPTIONS)]
    """The levels, from the lowest."""

    def answers(self) -> list[Option]:
        return [Option(str(level), text) for level, text in enumerate(self.criteria)]


Question = Annotated[
    Annotated[ChoiceQuestion, Tag("<choice>")]
    | Annotated[NoulQuestion, Tag("<noul>")]
    | Annotated[ScoreQuestion, Tag("<score>")],
    by_type("choice, noul or score"),
]


class SystemOneBody(Body):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset(("keep_alive",))
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"stream": (False,)}

    state: Content
    """The subject of the questions: a text, or JSON. Its tokens are computed once."""
    questions: Annotated[
        dict[str, Question], BeforeValidator(partial(few, most=MAX_QUESTIONS, noun="questions"))
    ]
    """The questions by name."""

    @model_validator(mode="after")
    def _some_question(self) -> SystemOneBody:
        if not self.questions:
            raise failure("invalid", "needs a question", "questions")
        return self
