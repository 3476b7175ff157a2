"""Bodies of /v2/embed and /v2/rerank, as in Cohere's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from server.api.openai.schemas.embedding import (
    MAX_TEXTS,
    Documents,
    EncoderBody,
    Text,
    Texts,
    texts_of,
)
from server.api.openai.schemas.fields import LIST, Count, having, never
from server.http.body import Part, failure

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# The purposes of a text. Many checkpoints have a prompt for each.
PURPOSES = frozenset({"search_document", "search_query", "classification", "clustering"})

PURPOSE_SCHEMA: dict[str, Any] = {"enum": [*sorted(PURPOSES), None]}


class ContentPart(Part):
    type: Literal["text"]
    """Only texts."""
    text: Text


class Input(Part):
    """A text in parts, which are joined."""

    content: Annotated[list[ContentPart], Field(fail_fast=True, min_length=1, max_length=64)]


Inputs = Annotated[list[Input], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]


class EmbedBody(EncoderBody):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [having(texts=LIST), having(inputs=LIST)]},
                never(texts=LIST, inputs=LIST),
            ]
        }
    )

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "images": (),
        "truncate_prompt_tokens": (),
    }
    DEFAULTS: ClassVar[dict[str, Any]] = EncoderBody.DEFAULTS | {
        "embedding_types": ["float"],
        "truncate": "END",
    }

    texts: Texts | None = None
    """The texts to encode."""
    inputs: Inputs | None = None
    """The same, in parts."""
    input_type: Annotated[str | None, WithJsonSchema(PURPOSE_SCHEMA)] = None
    """One of Cohere's purposes of a text. It chooses the prompt, if the model has prompts."""
    embedding_types: (
        Annotated[list[EmbeddingType], Field(fail_fast=True, min_length=1, max_length=6)] | None
    ) = None
    """Forms of each vector. int8 and uint8: codes up to the vector's largest number. binary and
    ubinary: the signs of eight numbers as one."""
    output_dimension: Count | None = None
    """Return only this many first numbers of a vector; default: all."""
    max_tokens: Count | None = None
    """Most tokens of a text, special tokens included; default: as many as the model accepts."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where a text is cut that is too long; NONE: it is refused."""

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise failure("invalid", "exactly one of texts and inputs is required", "texts")
        return self

    @model_validator(mode="after")
    def _known_purpose(self) -> Self:
        if self.input_type is not None and self.input_type not in PURPOSES:
            known = ", ".join(sorted(PURPOSES))
            raise failure("invalid", f"Unsupported input_type; known: {known}", "input_type")
        return self

    @property
    def all_texts(self) -> list[str]:
        """The texts, under either name."""
        if self.texts is not None:
            return self.texts
        return ["".join([part.text for part in each.content]) for each in self.inputs or ()]


class RerankBody(EncoderBody):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rank_fields": (),
        "truncate_prompt_tokens": (),
    }

    query: Text
    """The text that documents are compared with."""
    documents: Documents
    """The texts to order."""
    top_n: Count | None = None
    """Return only this many documents; default: all."""
    max_tokens_per_doc: Count | None = None
    """Keep only this many first tokens of a document; default: all."""

    @property
    def texts(self) -> list[str]:
        return texts_of(self.documents)
