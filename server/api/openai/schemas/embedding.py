"""Bodies of /v1/embeddings (OpenAI's API), /v1/score (vLLM's) and /v1/rerank (Jina's, Cohere's)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from server.api.openai.number_formats import Endianness, NumberFormat
from server.api.openai.schemas.fields import (
    LIST,
    Count,
    OneOrMore,
    Priority,
    TruncationSide,
    having,
    never,
)
from server.api.openai.schemas.prompts import MAX_PROMPTS, Inputs, Plain, plain_list
from server.generation.texts import WHOLE_CONTEXT
from server.http.body import MAX_TEXT, Body, Part, failure

MAX_TEXTS = MAX_PROMPTS
PROMPT_FIELDS = ("prompt", "prompt_name", "instruction")
TEXT: dict[str, Any] = {"type": "string"}
Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
Side = Annotated[Annotated[Text, Tag("<one>")] | Annotated[Texts, Tag("<list>")], OneOrMore]


def _lower_case(value: Any) -> Any:
    """Return `left` for the `Left` of text-embeddings-inference."""
    return value.lower() if isinstance(value, str) else value


CutSide = Annotated[TruncationSide, BeforeValidator(_lower_case)]


class EncoderBody(Body):
    """The fields that all routes of encoders share."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(("user",))
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"normalize": (True,)}

    DEFAULTS: ClassVar[dict[str, Any]] = {"priority": 0}

    priority: Priority | None = None
    """A lower value is served earlier."""


class TextsBody(EncoderBody):
    """The fields that the routes share, except Cohere's."""

    truncate_prompt_tokens: Count | Literal[-1] | None = None
    """Keep only this many first tokens of a text; −1: as many as the model accepts."""
    truncation_side: CutSide | None = Field(
        None, validation_alias=AliasChoices("truncation_side", "truncation_direction")
    )
    """The side that `truncate_prompt_tokens` cuts off; `left` keeps the last tokens."""

    @property
    def keeps_end(self) -> bool:
        """Whether a text that is too long loses its beginning."""
        return self.truncation_side == "left"


def tokens_kept(body: TextsBody, truncate: bool | None) -> int | None:
    """Return `truncate_prompt_tokens`; `truncate` is its −1 in text-embeddings-inference."""
    if truncate and body.truncate_prompt_tokens is None:
        return WHOLE_CONTEXT
    return body.truncate_prompt_tokens


class PairsBody(TextsBody):
    """The fields that the routes of scores share."""

    DEFAULTS: ClassVar[dict[str, Any]] = EncoderBody.DEFAULTS | {"use_activation": True}

    use_activation: bool | None = None
    """Return scores behind the activation of a model's head, not its logits."""

    @property
    def raw_field(self) -> str | None:
        """The name of the field that asks for logits, or None."""
        return "use_activation" if self.use_activation is False else None


def _one_prompt_schema() -> dict[str, Any]:
    """Return the schema of bodies with at most one of the fields of a prompt."""
    pairs = itertools.combinations(PROMPT_FIELDS, 2)
    return {"allOf": [never(**dict.fromkeys(pair, TEXT)) for pair in pairs]}


class EmbeddingBody(TextsBody):
    model_config = ConfigDict(json_schema_extra=_one_prompt_schema())

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    DEFAULTS: ClassVar[dict[str, Any]] = EncoderBody.DEFAULTS | {
        "add_special_tokens": True,
        "embed_dtype": "float32",
        "encoding_format": "float",
        "endianness": "native",
        "padding": "do_not_pad",
        "use_activation": None,  # as the checkpoint says
    }

    input: Inputs
    """Texts or their token ids. Texts among ids get no special tokens."""
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """bytes: all vectors as one body; the header `metadata` says where each one is."""
    embed_dtype: NumberFormat | None = None
    """The numbers of base64 and bytes."""
    endianness: Endianness | None = None
    """The order of the bytes of such a number; `native` is little."""
    use_activation: bool | None = Field(
        None, validation_alias=AliasChoices("use_activation", "normalize")
    )
    """Return vectors of length 1; default: if the checkpoint does so."""
    dimensions: Count | None = None
    """Return only this many first numbers of a vector; default: all."""
    add_special_tokens: bool | None = None
    """Add the special tokens of the tokenizer to each text."""
    padding: Literal["max_length", "do_not_pad"] | None = None
    """max_length: the model reads each text with padding tokens up to its limit."""
    prompt_name: str | None = None
    """The name of the checkpoint's prompt that is put in front of each text."""
    prompt: Annotated[str, StringConstraints(max_length=MAX_TEXT)] | None = None
    """The text that is put in front of each text; empty: none, not even the checkpoint's."""
    instruction: Annotated[str, StringConstraints(max_length=MAX_TEXT)] | None = None
    """The task in the checkpoint's prompt of queries, as of Qwen3-Embedding."""

    @model_validator(mode="after")
    def _one_prompt(self) -> EmbeddingBody:
        given = [name for name in PROMPT_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise failure("invalid", f"only one of {' and '.join(given)} may be set", given[1])
        if given and any(isinstance(text, list) for text in self.inputs):
            raise failure("invalid", "goes before texts; the input has token ids", given[0])
        return self

    @property
    def inputs(self) -> list[Plain]:
        return plain_list(self.input)


class Document(Part):
    text: Text


Documents = Annotated[
    list[
        Annotated[
            Annotated[Text, Tag("<text>")] | Annotated[Document, Tag("<document>")],
            Discriminator(lambda value: "<text>" if isinstance(value, str) else "<document>"),
        ]
    ],
    Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS),
]


def texts_of(documents: Sequence[str | Document]) -> list[str]:
    """Return the texts of documents."""
    return [each if isinstance(each, str) else each.text for each in documents]


class RerankBody(PairsBody):
    """`top_n` documents are returned, all of them by default, with their texts if wanted.

    With `texts` the body and the answer are those of text-embeddings-inference.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [having(documents=LIST), having(texts=LIST)]},
                never(documents=LIST, texts=LIST),
            ]
        }
    )

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = EncoderBody.UNSUPPORTED | {
        "rank_fields": (),  # of Cohere's first API: the fields that are scored
    }

    query: Text
    """The text that documents are compared with."""
    documents: Documents | None = None
    """The texts to order."""
    texts: Texts | None = None
    """The same in text-embeddings-inference, whose answer is a list."""
    truncate: bool | None = None
    """Cut texts that are too long, as `truncate_prompt_tokens` = −1 does."""
    max_tokens_per_doc: Count | None = None
    """Keep only this many first tokens of a document, as in Cohere's API; default: all."""
    top_n: Count | None = None
    """Return only this many documents; default: all."""
    return_documents: bool | None = Field(
        None, validation_alias=AliasChoices("return_documents", "return_text")
    )
    """Return the texts of the documents, too."""

    raw_scores: bool | None = None
    """The opposite of `use_activation`, in text-embeddings-inference."""

    @model_validator(mode="after")
    def _one_name(self) -> RerankBody:
        if self.raw_scores is not None and self.use_activation is self.raw_scores:
            raise failure("invalid", "is the opposite of use_activation", "raw_scores")
        return self

    @property
    def raw_field(self) -> str | None:
        return "raw_scores" if self.raw_scores else super().raw_field

    @model_validator(mode="after")
    def _one_list(self) -> RerankBody:
        if (self.documents is None) == (self.texts is None):
            raise failure("invalid", "exactly one of documents and texts is required", "documents")
        return self

    @property
    def candidates(self) -> list[str]:
        """The texts to order, under either name."""
        if self.texts is not None:
            return self.texts
        return texts_of(self.documents or ())


def side_texts(side: str | list[str]) -> list[str]:
    """Return a text or a list of texts as a list."""
    return [side] if isinstance(side, str) else side


def expect_pairs(first: Sequence[str], second: Sequence[str]) -> None:
    """Raise the failure of a body unless text_1 has one text for all, or as many as text_2."""
    count = len(second)
    if len(first) not in (1, count):
        found = f"has {count} texts, but text_1 has {len(first)}; text_1 needs 1 or {count}"
        raise failure("invalid", found, "text_2")


class ScoreBody(PairsBody):
    """The pairs to score: one text with one or more, or two lists of equal length."""

    # vLLM's newer names, and its internal ones.
    text_1: Side = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    """One text, or as many as in `text_2`."""
    text_2: Side = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    """The texts to compare."""

    @property
    def first_texts(self) -> list[str]:
        return side_texts(self.text_1)

    @property
    def second_texts(self) -> list[str]:
        return side_texts(self.text_2)

    @model_validator(mode="after")
    def _pairs(self) -> ScoreBody:
        expect_pairs(self.first_texts, self.second_texts)
        return self
