"""Images in the contents of Responses and Messages: members of the unions of their parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from server.http.body import JsonObject, Part, PictureUrl, Text, failure


class ResponseImagePart(Part):
    """An image of OpenAI's responses, also in the result of a call."""

    type: Literal["input_image"]
    file_id: Annotated[str, BeforeValidator(lambda value: _no_file_id(value))] | None = None
    """Not supported."""
    image_url: PictureUrl
    """A `data:` URL, or an address of a host that the operator allows."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    """`low` shrinks the picture to 512 pixels a side; other values have no effect."""


def _no_file_id(value: Any) -> Any:
    if value is not None:
        raise failure("unsupported", "uploaded files are not read; send the image in image_url")
    return value


class Base64Source(Part):
    type: Literal["base64"]
    data: Text
    """The encoded bytes."""
    media_type: str | None = None
    """Not read: the bytes show their format."""

    @property
    def address(self) -> str:
        return f"data:;base64,{self.data}"


class UrlSource(Part):
    type: Literal["url"]
    url: PictureUrl
    """A `data:` URL, or an address of a host that the operator allows."""

    @property
    def address(self) -> str:
        return self.url


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _no_file(value: Any) -> Any:
    if _kind(value) == "file":
        message = "uploaded files are not read; send the image in base64"
        raise failure("unsupported", message, "type")
    return value


def _source_tag(value: Any) -> str:
    return "<url>" if _kind(value) == "url" else "<base64>"


class ImageBlock(Part):
    """An image of Anthropic's messages, also in the result of a call."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(_source_tag),
        BeforeValidator(_no_file),
    ]
    """The image: `base64` with data, or `url`."""
    cache_control: JsonObject | None = None
    """No effect: prefixes are always cached."""
    transformations: Annotated[list[JsonObject], Field(max_length=64)] | None = None
    """Not supported."""

    @field_validator("transformations")
    @classmethod
    def _no_transformations(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise failure("unsupported", "transformations of images are not supported")
        return value
