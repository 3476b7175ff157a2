"""Parts with images in the contents of three APIs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from server.api.openai.schemas.chat import ImagePart
from server.http.errors import to_api_error
from server.images.content import ImageBlock, ResponseImagePart
from server.images.source import ImageSource, source_of

DATA = "data:image/png;base64,AAAA"
WEB = "https://pictures.example/a.png"
KINDS = {"chat": ImagePart, "responses": ResponseImagePart, "anthropic": ImageBlock}
Json = dict[str, Any]


def read_source(part: Any) -> ImageSource:
    """Return the source of an image as the reader finds it."""
    if isinstance(part, ImagePart):
        return source_of(part.part["url"], part.part["detail"])
    if isinstance(part, ResponseImagePart):
        return source_of(part.image_url, part.detail)
    return source_of(part.source.address)


def chat(image_url: Any) -> Json:
    return {"type": "image_url", "image_url": image_url}


def response(**fields: Any) -> Json:
    return {"type": "input_image", **fields}


def block(**source: Any) -> Json:
    return {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("api", "part", "source"),
    [
        ("chat", chat({"url": DATA}), ImageSource(DATA)),
        ("chat", chat({"url": DATA, "detail": "auto"}), ImageSource(DATA)),
        ("chat", chat({"url": DATA, "detail": "original"}), ImageSource(DATA)),
        ("chat", chat({"url": DATA, "detail": "low"}), ImageSource(DATA, is_small=True)),
        ("chat", chat({"url": DATA, "detail": None}), ImageSource(DATA)),
        ("chat", chat(DATA), ImageSource(DATA)),
        ("chat", chat(" DATA:,AAAA"), ImageSource("DATA:,AAAA")),
        ("chat", chat({"url": WEB}), ImageSource(WEB, is_address=True)),
        ("chat", chat({"url": " HTTP://a/b\n"}), ImageSource("HTTP://a/b", is_address=True)),
        ("chat", chat({"url": "AAAA"}), ImageSource("AAAA")),
        ("responses", response(image_url=DATA, detail="high"), ImageSource(DATA)),
        ("responses", response(image_url=DATA, file_id=None), ImageSource(DATA)),
        ("responses", response(image_url=WEB), ImageSource(WEB, is_address=True)),
        (
            "responses",
            response(image_url=WEB, detail="low"),
            ImageSource(WEB, is_address=True, is_small=True),
        ),
        (
            "anthropic",
            block(type="base64", media_type="image/png", data="AAAA"),
            ImageSource("data:;base64,AAAA"),
        ),
        ("anthropic", block(type="base64", data=WEB), ImageSource("data:;base64," + WEB)),
        ("anthropic", block(type="url", url=WEB), ImageSource(WEB, is_address=True)),
        ("anthropic", block(type="url", url=DATA), ImageSource(DATA)),
        (
            "anthropic",
            {**block(type="url", url=DATA), "cache_control": {"type": "ephemeral"}},
            ImageSource(DATA),
        ),
        ("anthropic", {**block(type="url", url=DATA), "transformations": []}, ImageSource(DATA)),
    ],
)
def test_part_with_an_image_has_its_source(api: str, part: Json, source: ImageSource) -> None:
    assert read_source(KINDS[api].model_validate(part)) == source


@pytest.mark.parametrize(
    ("api", "part", "param", "code", "words"),
    [
        ("chat", {"type": "image_url"}, "image_url", "missing_required_parameter", "required"),
        ("chat", chat({}), "image_url.url", "invalid_value", "string"),
        ("chat", chat(None), "image_url", "invalid_value", "object"),
        ("chat", chat([DATA]), "image_url", "invalid_value", "object"),
        ("chat", chat({"url": 5}), "image_url.url", "invalid_value", "string"),
        ("chat", chat("file:///etc/passwd"), "image_url", "unsupported_parameter", "file: is not"),
        ("chat", chat({"url": "s3://b/a"}), "image_url.url", "unsupported_parameter", "s3: is not"),
        ("chat", chat({"url": " C:\\a"}), "image_url.url", "unsupported_parameter", "data: URL"),
        ("chat", chat({"url": DATA, "detail": "x"}), "image_url.detail", "invalid_value", "auto"),
        ("responses", response(), "image_url", "missing_required_parameter", "required"),
        (
            "responses",
            response(file_id="a", image_url=DATA),
            "file_id",
            "unsupported_parameter",
            "send the image in image_url",
        ),
        ("responses", response(file_id="a"), "file_id", "unsupported_parameter", "not read"),
        ("responses", response(image_url="ftp:x"), "image_url", "unsupported_parameter", "ftp:"),
        (
            "anthropic",
            block(type="file", file_id="file_1"),
            "source.type",
            "unsupported_parameter",
            "files are not read; send the image in base64",
        ),
        ("anthropic", block(type="text"), "source.type", "invalid_value", "base64"),
        ("anthropic", block(data="AAAA"), "source.type", "missing_required_parameter", "required"),
        ("anthropic", block(type="url"), "source.url", "missing_required_parameter", "required"),
        ("anthropic", block(type="url", url="file:a"), "source.url", "unsupported_parameter", "fi"),
        ("anthropic", {"type": "image"}, "source", "missing_required_parameter", "required"),
        ("anthropic", {"type": "image", "source": 5}, "source", "invalid_value", "object"),
        (
            "anthropic",
            {**block(type="url", url=DATA), "transformations": [{"type": "crop"}]},
            "transformations",
            "unsupported_parameter",
            "not supported",
        ),
    ],
)
def test_part_without_a_readable_image_is_a_400_that_names_the_field(
    api: str, part: Json, param: str, code: str, words: str
) -> None:
    with pytest.raises(ValidationError) as error:
        TypeAdapter(list[KINDS[api]]).validate_python([part])  # type: ignore[misc]
    refused = to_api_error(error.value)
    assert (refused.status, refused.code, refused.param) == (400, code, f"0.{param}")
    assert words in refused.message
    assert len(refused.message) < 200
