"""Images in the text of a prompt: their markers, and the places of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.protocol.images import Image
from server.text.image_reader import ImageReader, ReadImage
from server.text.tokenizer import BREAK

Message = dict[str, Any]


class ImageTextError(ValueError):
    """The prompt does not show the images of its chat. The client gets the text."""


def image_parts(message: Message) -> list[dict[str, Any]]:
    """Return the images of a message."""
    content = message.get("content")
    return (
        [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
    )


def marked(message: Message, reader: ImageReader) -> Message:
    """Return a message with a marker for each image, and no other in its texts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": broken(content, reader)}
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] == "image":
            # Templates that read no lists get the texts of all parts.
            parts.append({"type": "image", "text": reader.marker})
        else:
            parts.append({**part, "text": broken(part["text"], reader)})
    return {**message, "content": parts}


def broken(text: str, reader: ImageReader) -> str:
    """Return a text in which the names of image tokens are not read as these tokens."""
    for name in {reader.marker, reader.placeholder}:
        text = text.replace(name, name[0] + BREAK + name[1:])
    return text


def expanded(text: str, reader: ImageReader, images: Sequence[ReadImage]) -> str:
    """Return a prompt's text with all tokens of its images.

    Raises ImageTextError if the template does not show each image once.
    """
    before, *rest = text.split(reader.marker)
    if len(rest) != len(images):
        raise ImageTextError(
            f"The chat template shows {len(rest)} images; the messages have {len(images)}."
        )
    parts = [image.expansion + after for image, after in zip(images, rest, strict=True)]
    return before + "".join(parts)


def placed(
    ids: Sequence[int], placeholder: int | None, images: Sequence[ReadImage]
) -> tuple[Image, ...]:
    """Return the images with the runs of their tokens in the prompt `ids`.

    Raises ImageTextError if the prompt has another number of placeholder tokens than the images.
    """
    positions = [index for index, token in enumerate(ids) if token == placeholder]
    due = sum(image.count for image in images)
    if len(positions) != due:
        raise ImageTextError(
            f"The prompt has {len(positions)} image tokens; the images need {due}. The tokenizer "
            "or the chat template does not fit the image processor."
        )
    found, first = [], 0
    for image in images:
        runs = _runs(positions[first : first + image.count])
        first += image.count
        place = msgspec.structs.replace(image.image.place, runs=runs)
        found.append(msgspec.structs.replace(image.image, place=place))
    return tuple(found)


def salted(images: Sequence[Image], salt: str) -> tuple[Image, ...]:
    """Return images whose encoded form is shared only by requests of equal salt."""
    if not salt:
        return tuple(images)
    found = []
    for image in images:
        digest = hashlib.blake2b(image.place.digest + salt.encode(), digest_size=16).digest()
        place = msgspec.structs.replace(image.place, digest=digest)
        found.append(msgspec.structs.replace(image, place=place))
    return tuple(found)


def _runs(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return neighbouring positions as runs: (first, count)."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and sum(runs[-1]) == position:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((position, 1))
    return tuple(runs)
