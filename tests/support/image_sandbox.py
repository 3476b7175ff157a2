"""A process with a processor for tests: `python -m tests.support.image_sandbox`.

A picture becomes one tile of its own size, or of `edge` pixels a side. Pictures of one row
misbehave by their width.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from engine.errors import ConfigError
from server.confined.process import serve
from server.images.processors.processor import ImageShape, UnfitPictureError
from server.images.sandbox import ImageSandbox


@dataclass(frozen=True)
class PlainProcessor:
    edge: int
    marker: str = "<image>"
    placeholder: str = "<image>"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        if picture.height == 1:
            misbehave(picture.width)
        assert picture.mode == "RGB"
        size = (picture.height, picture.width)
        if self.edge:
            picture = picture.resize((self.edge, self.edge))
        embeddings = 10 if alone else 4
        shape = ImageShape(1, picture.height, picture.width, 0, 0, embeddings, size)
        return shape, picture.tobytes()[: -1 if size == (1, 13) else None]

    def expansion(self, shape: ImageShape) -> str:
        return self.placeholder * shape.embeddings


def misbehave(width: int) -> None:
    match width:
        case 3:
            raise UnfitPictureError("The image is too thin for this model.")
        case 5:
            os.abort()
        case 7:
            time.sleep(60)
        case 11:
            bytearray(1 << 40)


def read_processor(settings: dict[str, Any]) -> PlainProcessor:
    if "edge" not in settings:
        raise ConfigError("The settings have no edge.")
    return PlainProcessor(settings["edge"])


if __name__ == "__main__":
    serve(ImageSandbox(read_processor).handle)
