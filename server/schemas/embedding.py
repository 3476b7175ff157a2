"""Bodies of /v1/embeddings, OpenAI's, and /v1/score, vLLM's. A field they do not name is a 400."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, Tag, model_validator

from server.schemas.body import Body, failure
from server.schemas.generate import INT32, Count, OneOrMore, Shape, TokenIds, in_list

MAX_TEXTS = 2048
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
Inputs = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Texts, Tag("<list>")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_TEXTS), Tag("<id lists>")],
    Shape,
]
Side = Annotated[Annotated[Text, Tag("<one>")] | Annotated[Texts, Tag("<list>")], OneOrMore]


class EncoderBody(Body):
    """What both routes share; `user` changes nothing here."""

    model_config = ConfigDict(extra="forbid")

    user: str | None = None
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] | None = None
    # The most tokens of a text, of which the first are kept; -1: as many as the model takes.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None


class EmbeddingBody(EncoderBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        return in_list(self.input)


class ScoreBody(EncoderBody):
    """One text with one, one with many, or as many with as many."""

    text_1: Side
    text_2: Side

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        first, second = (
            [side] if isinstance(side, str) else side for side in (self.text_1, self.text_2)
        )
        return first, second

    @model_validator(mode="after")
    def _pairs(self) -> ScoreBody:
        first, second = map(len, self.sides)
        if first not in (1, second):
            raise failure("invalid", f"has {second} texts; text_1 has {first}, not 1", "text_2")
        return self
