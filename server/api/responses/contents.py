"""Contents of items: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
)

from server.api.openai.schemas.chat import RefusalPart
from server.api.openai.schemas.fields import MAX_TOKEN_IDS, shape_of
from server.http.body import MAX_PARTS, JsonObject, Part, Text, failure
from server.images.content import ResponseImagePart

Json = dict[str, Any]
TextKind = Literal["input_text", "output_text", "text"]
READABLE = ("input_text", "output_text", "text", "refusal")


def kind_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class ResponseTextPart(Part):
    """A text of any role. Clients send the last two fields with answers that they send back."""

    type: TextKind
    text: Text
    annotations: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = None
    logprobs: Annotated[list[JsonObject], Field(max_length=MAX_TOKEN_IDS)] | None = None


class UnreadPart(Part):
    """A file in the result of a call. The model is shown that it was left out."""

    type: Literal["input_file"]
    file_data: Text | None = None
    """Not read."""
    file_url: Text | None = None
    """Not read."""
    file_id: str | None = None
    """Not read."""
    filename: str | None = None
    """Not read."""

    @property
    def text(self) -> str:
        return "[A file was left out: this model reads text only.]"


TAGS = {"refusal": "<refusal>", "input_image": "<image>", "input_file": "<unread>"}


def _tag(part: Any) -> str:
    return TAGS.get(kind_of(part), "<text>")


AnyPart = Annotated[
    Annotated[ResponseTextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ResponseImagePart, Tag("<image>")],
    Discriminator(_tag),
]


def _readable(value: Any) -> Any:
    """Refuse files and other parts by the name of their field."""
    for index, part in enumerate(value if isinstance(value, list) else ()):
        kind = kind_of(part)
        if isinstance(kind, str) and kind not in (*READABLE, "input_image"):
            message = "only parts of type input_text and input_image are supported"
            raise failure("unsupported", message, index, "type")
    return value


def _known(value: Any) -> Any:
    """Refuse parts of other types by the name of their field."""
    types = (*READABLE, "input_image", "input_file")
    for index, part in enumerate(value if isinstance(value, list) else ()):
        kind = kind_of(part)
        if isinstance(kind, str) and (kind not in types or kind == "refusal"):
            message = "only parts of type input_text, input_image and input_file are supported"
            raise failure("unsupported", message, index, "type")
    return value


Result = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[
        list[
            Annotated[
                Annotated[ResponseTextPart, Tag("<text>")]
                | Annotated[ResponseImagePart, Tag("<image>")]
                | Annotated[UnreadPart, Tag("<unread>")],
                Discriminator(_tag),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_PARTS),
        Tag("<list>"),
    ],
    shape_of("a string or a list of parts"),
    BeforeValidator(_known),
]
"""The result of a call. Agents send images to any model: others read that one was left out."""


Content = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[list[AnyPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    shape_of("a string or a list of parts"),
    BeforeValidator(_readable),
]


def input_parts(content: Content | Result) -> list[Json]:
    """Return the stored form of a content that the model reads and did not write."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [_input_part(part) for part in content]


def _input_part(part: AnyPart | UnreadPart) -> Json:
    if isinstance(part, ResponseImagePart):
        detail = part.detail or "auto"
        return {"type": "input_image", "image_url": part.image_url, "detail": detail}
    return {"type": "input_text", "text": part.text}


def output_parts(content: Content) -> list[Json]:
    """Return the stored form of a content that the model wrote."""
    if isinstance(content, str):
        return [_output_text(content)]
    return [_output_part(part) for part in content]


def _output_part(part: AnyPart) -> Json:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    assert not isinstance(part, ResponseImagePart), "messages of the assistant have none"
    return _output_text(part.text, part.annotations or (), part.logprobs or ())


def _output_text(
    text: str, annotations: Sequence[Json] = (), logprobs: Sequence[Json] = ()
) -> Json:
    return {
        "type": "output_text",
        "text": text,
        "annotations": list(annotations),
        "logprobs": list(logprobs),
    }
