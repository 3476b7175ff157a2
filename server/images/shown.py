"""ShownImages: the images of one chat in the text and among the tokens of its prompt.

A chat template writes a marker for each image. In the prompt's text each marker becomes the tokens
of its image, and in the engine their embeddings are the image's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from engine.protocol.generate import Image
from server.images.processors.processor import PatchGrid
from server.text.chat_template import TemplateError
from server.text.tokenizer import BREAK

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How the prompts of a model show an image."""

    marker: str  # what the chat template writes
    placeholder: str  # the token in whose place embeddings are
    token_id: int  # of the placeholder


@dataclass(frozen=True, slots=True)
class ReadImage:
    """A picture as the model's encoder reads it, and how the prompt shows it."""

    image: Image  # without runs
    count: int  # of placeholder tokens in `expansion`
    expansion: str  # text in place of the marker
    grids: Sequence[PatchGrid] = ()  # where its embeddings are on the picture
    source: object = None  # its ProcessedImage, which counts while a request has it


@dataclass(frozen=True, slots=True)
class ShownImages:
    """The images of a chat, in order, and its messages with a marker for each.

    They implement `server.text.content_parts.ChatImages`.
    """

    messages: list[Message]
    images: Sequence[ReadImage]
    tokens: ImageTokens
    unread: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        """The number of placeholder tokens in the prompt."""
        return sum(each.count for each in self.images)

    @property
    def grids(self) -> list[list[dict[str, Any]]]:
        """The PatchGrids of each image, as JSON."""
        return [[asdict(grid) for grid in each.grids] for each in self.images]

    def expanded(self, text: str) -> str:
        """Return a prompt's text with all tokens of its images.

        Raises TemplateError if the template does not show each image once.
        """
        before, *rest = text.split(self.tokens.marker)
        if len(rest) != len(self.images):
            raise TemplateError(
                f"The chat template shows {len(rest)} images; the messages have {len(self.images)}."
            )
        parts = [each.expansion + after for each, after in zip(self.images, rest, strict=True)]
        return before + "".join(parts)

    def placed(self, ids: Sequence[int], salt: str) -> tuple[Image, ...]:
        """Return the images with the runs of their tokens in the prompt `ids`.

        Only requests of equal `salt` share what was encoded. Raises TemplateError if the prompt has
        another number of placeholder tokens than the images.
        """
        token = self.tokens.token_id
        positions = [index for index, each in enumerate(ids) if each == token]
        if len(positions) != self.num_tokens:
            raise TemplateError(
                f"The prompt has {len(positions)} image tokens; the images need "
                f"{self.num_tokens}. The tokenizer or the chat template does not fit the image "
                "processor."
            )
        found, first = [], 0
        for each in self.images:
            runs = _runs(positions[first : first + each.count])
            first += each.count
            digest = _salted(each.image.digest, salt)
            found.append(msgspec.structs.replace(each.image, runs=runs, digest=digest))
        return tuple(found)


def image_parts(message: Message) -> list[dict[str, Any]]:
    """Return the images of a message."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if part["type"] == "image"]


def marked(message: Message, tokens: ImageTokens) -> Message:
    """Return a message with a marker for each image, and no other in its texts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": broken(content, tokens)}
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] == "image":
            # Templates that read no lists get the texts of all parts.
            parts.append({"type": "image", "text": tokens.marker})
        else:
            parts.append({**part, "text": broken(part["text"], tokens)})
    return {**message, "content": parts}


def broken(text: str, tokens: ImageTokens) -> str:
    """Return a text in which the names of image tokens are not read as these tokens."""
    for name in {tokens.marker, tokens.placeholder}:
        text = text.replace(name, name[0] + BREAK + name[1:])
    return text


def _salted(digest: bytes, salt: str) -> bytes:
    if not salt:
        return digest
    return hashlib.blake2b(digest + salt.encode(), digest_size=16).digest()


def _runs(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return neighbouring positions as runs: (first, count)."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and sum(runs[-1]) == position:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((position, 1))
    return tuple(runs)
