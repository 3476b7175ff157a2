"""Readers of the images in chats: of a checkpoint that takes images, and of one that takes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.image_config import SEEING, ImageConfig, missing_tower, read_image_config
from engine.errors import ConfigError
from engine.protocol.generate import Image
from server.http.errors import ApiError, invalid, unsupported
from server.images.addresses import ImageAddresses
from server.images.errors import (
    ImageError,
    ImageRoomError,
    ImagesOverloadedError,
    TooManyImagesError,
)
from server.images.pool import ImagePool, ProcessedImage
from server.images.processors.processor import Processor
from server.images.processors.registry import processor_of
from server.images.shown import ImageTokens, ReadImage, ShownImages, image_parts, marked
from server.images.source import ImageSource, source_of
from server.images.worker import settings_of
from server.text.content_parts import text_part
from server.text.tokenizer import Tokenizer

WORKER = "server.images.worker"
NO_SETTINGS = ImageConfig({}, "preprocessor_config.json", {})
RETRY_S = 2
LEFT_OUT = "[An image was left out: this model reads text only.]"
Message = dict[str, Any]


class Reader:
    """Reads images with processes of its own. Texts that name its tokens become plain text."""

    def __init__(
        self,
        tokens: ImageTokens,
        processor: Processor,
        pool: ImagePool,
        room: Callable[[], int],
    ) -> None:
        """`room` returns the tokens of the model's context, once the model is loaded."""
        self.close = pool.close
        self.token_id = tokens.token_id
        self._tokens, self._processor = tokens, processor
        self._pool, self._room = pool, room

    async def read(self, messages: Sequence[Message], param: str) -> ShownImages:
        """Return messages with a marker for each image. Raises a 400 ApiError.

        `param` is the field of the messages.
        """
        parts = [part for message in messages for part in image_parts(message)]
        read: list[ReadImage] = []
        if parts:
            images = await self._processed(parts, param)
            read = [self._read(image) for image in images]
        found = [marked(message, self._tokens) for message in messages]
        return ShownImages(found, read, self._tokens)

    async def _processed(self, parts: Sequence[Message], param: str) -> list[ProcessedImage]:
        try:
            sources = _sources(parts)
            return await self._pool.read_all(sources, self._room())
        except ImagesOverloadedError as error:
            headers = {"retry-after": str(RETRY_S)}
            raise ApiError(503, "server_overloaded", str(error), headers=headers) from error
        except TooManyImagesError as error:
            raise invalid(param, str(error)) from error
        except ImageRoomError as error:
            raise ApiError(400, "context_length_exceeded", str(error), param=param) from error
        except ImageError as error:
            which = f"Image {error.index + 1} of {len(parts)}: " if len(parts) > 1 else ""
            raise invalid(param, f"{which}{error}") from error

    def _read(self, processed: ProcessedImage) -> ReadImage:
        shape = processed.shape
        image = Image(
            digest=processed.digest,
            runs=(),
            pixels=processed.pixels,
            shape=(shape.tiles, shape.height, shape.width),
            grid=(shape.rows, shape.columns),
            size=shape.size,
        )
        processor = self._processor
        expansion, grids = processor.expansion(shape), processor.grids(shape)
        return ReadImage(image, shape.embeddings, expansion, grids, processed)


@dataclass(frozen=True, slots=True)
class TextMessages:
    """Messages without images."""

    messages: list[Message]
    unread: Sequence[str]
    num_tokens: int = 0
    grids: Sequence[list[dict[str, Any]]] = ()

    def expanded(self, text: str) -> str:
        """Return the text."""
        return text

    def placed(self, ids: Sequence[int], salt: str) -> tuple[Image, ...]:
        """Return no images."""
        return ()


class TextOnly:
    """The reader of a model that takes no images.

    Agents send images in the results of calls to any model; it reads that they were left out.
    """

    token_id = None

    def __init__(self, reason: str | None = None) -> None:
        """`reason` is what the checkpoint lacks, if other checkpoints of its kind see."""
        because = f" because {reason}" if reason else ""
        self._refusal = f"This model takes no images{because}; send text only."

    async def read(self, messages: Sequence[Message], param: str) -> TextMessages:
        """Return messages without images. Raises a 400 ApiError if the user sends one."""
        names: list[str] = []
        texts: list[Message] = []
        for message in messages:
            parts = image_parts(message)
            if parts and message["role"] != "tool":
                raise unsupported(param, self._refusal)
            names += [part["name"] for part in parts]
            texts.append(_without_images(message) if parts else message)
        return TextMessages(texts, names)

    def close(self) -> None:
        """Nothing runs."""


def _sources(parts: Sequence[Message]) -> list[ImageSource]:
    """Raises ImageError."""
    found: list[ImageSource] = []
    for index, part in enumerate(parts):
        try:
            found.append(source_of(part["url"], part["detail"]))
        except ImageError as error:
            raise ImageError(str(error), index) from error
    return found


def _without_images(message: Message) -> Message:
    content = [
        text_part(LEFT_OUT) if part["type"] == "image" else part for part in message["content"]
    ]
    return {**message, "content": content}


def image_reader(
    folder: Path, tokenizer: Tokenizer, hosts: Sequence[str], room: Callable[[], int]
) -> Reader | TextOnly:
    """Return the reader of a checkpoint.

    `hosts` are the values of --image-hosts. Raises ConfigError if its files cannot be used.
    """
    config_file = folder / "config.json"
    model = read_json(config_file) if config_file.is_file() else {}
    names = model.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if architecture not in SEEING:
        return TextOnly()
    if reason := missing_tower(model, folder):
        return TextOnly(reason)
    config = read_image_config(folder) or NO_SETTINGS
    processor = processor_of(model, config, architecture)
    token_id = tokenizer.token_id(processor.placeholder)
    if token_id is None:
        raise ConfigError(
            f"The tokenizer has no token {processor.placeholder}, in whose place images are."
        )
    tokens = ImageTokens(processor.marker, processor.placeholder, token_id)
    pool = ImagePool(WORKER, settings_of(model, config, architecture), ImageAddresses(hosts))
    return Reader(tokens, processor, pool, room)
