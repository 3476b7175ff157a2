"""What the spine knows of images: a reader, and what it makes of each picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol.images import Image


@dataclass(frozen=True, slots=True)
class ReadImage:
    """A picture as the model's encoder reads it, and how the prompt shows it."""

    image: Image  # its place has no runs yet
    count: int  # of placeholder tokens in `expansion`
    expansion: str  # text in place of the marker that the chat template writes


class ImageReader(Protocol):
    """Reads the pictures of requests for one model."""

    marker: str  # what the chat template writes for an image
    placeholder: str  # the token whose embeddings are an image's

    async def read(self, sources: Sequence[dict[str, Any]], param: str) -> list[ReadImage]:
        """Return the pictures of all images of a chat, in its order.

        A source is an image part of a message (`server.text.content_parts.image_part`). Raises a
        400 ApiError that says what is wrong with which image; `param` is the field of the messages.
        """

    def close(self) -> None:
        """End the reader's processes. Idempotent."""
