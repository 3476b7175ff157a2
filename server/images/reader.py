"""Reader: the images of requests for one checkpoint, and how its prompts show them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.image_config import SEEING, ImageConfig, read_image_config
from engine.errors import ConfigError
from engine.protocol.images import Image, ImagePlace
from server.http.errors import invalid
from server.images.addresses import ImageAddresses
from server.images.errors import ImageError
from server.images.pool import ImagePool, ProcessedImage
from server.images.processors.processor import ImageShape, Processor
from server.images.processors.registry import processor_of
from server.images.worker import settings_of
from server.text.image_reader import ReadImage
from server.text.tokenizer import Tokenizer

WORKER = "server.images.worker"
NO_SETTINGS = ImageConfig({}, "preprocessor_config.json", {})


class Reader:
    """An ImageReader (`server.text.image_reader`) with processes of its own."""

    def __init__(self, processor: Processor, pool: ImagePool, room: Callable[[], int]) -> None:
        """`room` returns the tokens of the model's context, once the model is loaded."""
        self.marker = processor.marker
        self.placeholder = processor.placeholder
        self.close = pool.close
        self._processor, self._pool, self._room = processor, pool, room

    async def read(self, sources: Sequence[dict[str, Any]], param: str) -> list[ReadImage]:
        """Return the images; see ImageReader."""
        try:
            images = await self._pool.read_all([part["source"] for part in sources], self._room())
        except ImageError as error:
            which = f"Image {error.index + 1} of {len(sources)}: " if len(sources) > 1 else ""
            raise invalid(param, f"{which}{error}") from error
        return await asyncio.to_thread(lambda: [self._read(image) for image in images])

    def _read(self, processed: ProcessedImage) -> ReadImage:
        shape = processed.shape
        place = ImagePlace(_digest(processed), (), _grid(shape))
        image = Image(
            place,
            processed.pixels,
            (shape.tiles, shape.height, shape.width),
            (shape.rows, shape.columns),
            shape.size,
        )
        return ReadImage(image, shape.embeddings, self._processor.expansion(shape))


def image_reader(
    folder: Path, tokenizer: Tokenizer, hosts: Sequence[str], room: Callable[[], int]
) -> Reader | None:
    """Return the reader of a checkpoint, or None if its model takes no images.

    `hosts` are the values of --image-hosts. Raises ConfigError if its files cannot be used.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        return None
    model = read_json(config_file)
    names = model.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if architecture not in SEEING:
        return None
    config = read_image_config(folder) or NO_SETTINGS
    processor = processor_of(model, config, architecture)
    if tokenizer.token_id(processor.placeholder) is None:
        raise ConfigError(
            f"The tokenizer has no token {processor.placeholder}, in whose place images are."
        )
    pool = ImagePool(WORKER, settings_of(model, config, architecture), ImageAddresses(hosts))
    return Reader(processor, pool, room)


def _digest(processed: ProcessedImage) -> bytes:
    """Return what identifies the embeddings of an image."""
    digest = hashlib.blake2b(processed.pixels, digest_size=16)
    digest.update(repr(processed.shape).encode())
    return digest.digest()


def _grid(shape: ImageShape) -> tuple[int, int]:
    """Return the rows and columns of the embeddings of an image that is one tile."""
    return (shape.rows, shape.columns) if shape.tiles == 1 else (0, 0)
