"""Images in the contents of three APIs: their parts, and the ImageSource that each one means.

The classes are members of the APIs' unions of parts. Their errors are those of pydantic, at the
path of the field.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from server.http.body import JsonObject, Part, Text, failure
from server.images.data_url import is_data_url
from server.images.source import ImageSource

TEMPLATE_PART = {"type": "image"}  # an image as chat templates read it
SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31}):")
# `low` shrinks the picture. The model's own processor decides about the others.
Detail = Literal["auto", "low", "high", "original"]
USE_IMAGE_URL = "send it as image_url with a data: URL"
NO_AUDIO = "audio is not supported by this server"
NO_VIDEO = "videos are not supported by this server; send frames as images"
# Parts of other servers, and of the APIs' other forms. No other type is known at all.
REFUSED = {
    "image_pil": f"a picture of Python cannot be sent over HTTP: {USE_IMAGE_URL}",
    "image_embeds": f"embeddings of images are not accepted; {USE_IMAGE_URL}",
    "audio_embeds": NO_AUDIO,
    "audio_url": NO_AUDIO,
    "input_audio": NO_AUDIO,
    "video": NO_VIDEO,
    "video_url": NO_VIDEO,
    "input_video": NO_VIDEO,
}


def refusal_of(kind: str) -> str | None:
    """Return why parts of a known type are not supported; None for all other types."""
    return REFUSED.get(kind)


def source_of(url: str, detail: str | None = None) -> ImageSource:
    """Return the source that a URL means: data, bare base64, or an http(s) address.

    Raises PydanticCustomError for other schemes, such as `file:`.
    """
    is_small = detail == "low"
    scheme = SCHEME.match(url)
    if scheme is None:
        return ImageSource(url, is_small=is_small)
    if is_data_url(url.lstrip()):
        return ImageSource(url.lstrip(), is_small=is_small)
    if scheme[1].lower() in ("http", "https"):
        return ImageSource(url.strip(), is_address=True, is_small=is_small)
    raise failure("unsupported", f"{scheme[1]}: is not supported; send a data: URL")


def _checked_url(url: str | None) -> str | None:
    """Refuse a scheme while the path of the field is known."""
    if url is not None:
        source_of(url)
    return url


class ImageUrl(Part):
    url: Text
    """A `data:` URL, or an address of a host that the operator allows."""
    detail: Detail | None = None
    """`low` shrinks the picture to 512 pixels a side; other values have no effect."""

    _check = field_validator("url")(_checked_url)


def _url_tag(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


class ChatImagePart(Part):
    """An image of OpenAI's chats. Some clients send the URL alone in place of the object."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[ImageUrl, Tag("<object>")],
        Discriminator(_url_tag),
    ]
    """The image: an object with `url`, or the URL alone."""

    @field_validator("image_url")
    @classmethod
    def _check(cls, value: str | ImageUrl) -> str | ImageUrl:
        if isinstance(value, str):
            source_of(value)
        return value

    @property
    def image(self) -> ImageSource:
        if isinstance(self.image_url, str):
            return source_of(self.image_url)
        return source_of(self.image_url.url, self.image_url.detail)


class ResponseImagePart(Part):
    """An image of OpenAI's responses, also in the result of a call."""

    type: Literal["input_image"]
    image_url: Text | None = None
    """A `data:` URL, or an address of a host that the operator allows."""
    detail: Detail | None = None
    """`low` shrinks the picture to 512 pixels a side; other values have no effect."""
    file_id: str | None = None
    """Not supported."""

    _check = field_validator("image_url")(_checked_url)

    @model_validator(mode="after")
    def _has_a_url(self) -> ResponseImagePart:
        if self.file_id is not None:
            raise failure("unsupported", "files are not read; send image_url", "file_id")
        if self.image_url is None:
            raise failure("invalid", "is required", "image_url")
        return self

    @property
    def image(self) -> ImageSource:
        assert self.image_url is not None
        return source_of(self.image_url, self.detail)


class Base64Source(Part):
    type: Literal["base64"]
    data: Text
    """The encoded bytes."""
    media_type: str | None = None
    """Not read: the bytes show their format."""

    @property
    def image(self) -> ImageSource:
        return ImageSource(self.data)


class UrlSource(Part):
    type: Literal["url"]
    url: Text
    """A `data:` URL, or an address of a host that the operator allows."""

    _check = field_validator("url")(_checked_url)

    @property
    def image(self) -> ImageSource:
        return source_of(self.url)


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _no_file(value: Any) -> Any:
    if _kind(value) == "file":
        raise failure("unsupported", "files are not read; send base64", "type")
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

    @property
    def image(self) -> ImageSource:
        return self.source.image

    @field_validator("transformations")
    @classmethod
    def _no_transformations(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise failure("unsupported", "transformations of images are not supported")
        return value
