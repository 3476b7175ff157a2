"""ImageSandbox: what the confined process does with images (`server.confined.process`).

The first message has the settings of the checkpoint's processor. Every other one is an image: the
encoded bytes, and in its JSON whether it is `alone` in its conversation and whether it `is_small`.
The answer's JSON has the `shape`, with the pixels behind it, or the `error` that the client gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from engine.errors import ConfigError
from server.images.decode import PictureError, open_picture, shrunk
from server.images.message import Json, pack, unpack
from server.images.processors.processor import Processor, UnfitPictureError

SMALL_EDGE = 512  # pixels; as in OpenAI's API for detail "low"


class ImageSandbox:
    """Answers the messages of the parent. `read_processor` makes the processor of its settings."""

    def __init__(self, read_processor: Callable[[Json], Processor]) -> None:
        self._read_processor = read_processor
        self._processor: Processor | None = None

    def handle(self, message: bytes) -> bytes:
        """Read the settings in the first message; process the image in others. May raise anything.

        An exception that is not listed here ends the process, and the client's message has no more
        than its status.
        """
        head, data = unpack(message)
        try:
            if self._processor is None:
                self._processor = self._read_processor(head)
                return pack({})
            picture = open_picture(data)
            if head["is_small"]:
                picture = shrunk(picture, SMALL_EDGE)
            shape, pixels = self._processor.process(picture, alone=head["alone"])
        except (ConfigError, PictureError, UnfitPictureError) as error:
            return pack({"error": str(error)})
        return pack({"shape": asdict(shape)}, pixels)
