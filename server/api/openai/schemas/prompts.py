"""Prompts of every shape that clients send: texts, token ids, both in one list, and objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from server.api.openai.schemas.fields import LIST, TEXT, TokenId, TokenIds, having, never
from server.http.body import Part, Text, failure

MAX_PROMPTS = 2048
Plain = str | list[int] | list[int | str]  # a prompt without objects


class PromptPart(Part):
    type: Literal["text"]
    """Only texts."""
    text: Annotated[Text, StringConstraints(min_length=1)]


class PromptObject(Part):
    """A prompt as an object of llama.cpp, which also holds images for models that see."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [having(prompt_string=TEXT), having(content=LIST)]},
                never(prompt_string=TEXT, content=LIST),
            ]
        }
    )

    prompt_string: Annotated[Text, StringConstraints(min_length=1)] | None = None
    """The text."""
    content: (
        Annotated[list[PromptPart], Field(fail_fast=True, min_length=1, max_length=64)] | None
    ) = None
    """The text in parts, which are joined."""
    multimodal_data: Annotated[list[str], Field(max_length=0)] | None = None
    """Images, which are not supported."""

    @model_validator(mode="after")
    def _is_one_text(self) -> Self:
        if (self.prompt_string is None) == (self.content is None):
            raise failure("invalid", "needs either prompt_string or content")
        return self

    @property
    def value(self) -> str:
        if self.prompt_string is not None:
            return self.prompt_string
        return "".join([part.text for part in self.content or ()])


def _kind_of(value: Any) -> str:
    """Return the union branch that fits the shape of `value`."""
    if isinstance(value, str):
        return "<one>"
    if not isinstance(value, list):
        return "<object>" if isinstance(value, dict | PromptObject) else "<one>"
    kinds = set(map(type, value))  # fast for a million token ids
    if kinds and kinds <= {int, float}:
        return "<ids>"
    return "<mixed>" if kinds & {int, float} else "<list>"


def _kind_inside(value: Any) -> str:
    """Return the branch of an item of a list of prompts, which is no such list itself."""
    kind = _kind_of(value)
    return "<mixed>" if kind == "<list>" else kind


Kind = Discriminator(_kind_of)
KindInside = Discriminator(_kind_inside)
SomeText = Annotated[Text, StringConstraints(min_length=1), Tag("<one>")]
Piece = Annotated[
    SomeText | Annotated[TokenId, Tag("<id>")],
    Discriminator(lambda value: "<one>" if isinstance(value, str) else "<id>"),
]
Ids = Annotated[TokenIds, Tag("<ids>")]
Mixed = Annotated[
    list[Piece], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<mixed>")
]
Object = Annotated[PromptObject, Tag("<object>")]
AnyText = Annotated[Text, Tag("<one>")]
Many = Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
OnePrompt = Annotated[AnyText | Ids | Mixed | Object, KindInside]
Prompts = Annotated[
    AnyText | Ids | Mixed | Object | Annotated[list[OnePrompt], Many, Tag("<list>")], Kind
]
OneInput = Annotated[SomeText | Ids | Mixed | Object, KindInside]
Inputs = Annotated[
    SomeText | Ids | Mixed | Object | Annotated[list[OneInput], Many, Tag("<list>")], Kind
]


def plain_list(given: Any) -> list[Plain]:
    """Return a value of `Prompts` or `Inputs` as the list of its prompts, without objects."""
    if _kind_of(given) == "<list>":
        return [_plain(item) for item in given]
    return [_plain(given)]


def _plain(prompt: Any) -> Any:
    return prompt.value if isinstance(prompt, PromptObject) else prompt
