"""Why images of a request were refused: one of them, or all together."""

from __future__ import annotations


class ImageError(Exception):
    """An image cannot be read or is not accepted. The client gets the text, in a 400.

    `index` is that of the image among those of its request.
    """

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class TooManyImagesError(ImageError):
    """A request has more images than are accepted. The message is about all of them."""


class ImageRoomError(ImageError):
    """Images alone have more tokens than the model's context. The message is about all of them."""


class ImagesOverloadedError(Exception):
    """The images of open requests leave no memory for more. The client may try again."""
