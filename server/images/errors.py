"""ImageError: why an image of a request was refused."""

from __future__ import annotations


class ImageError(Exception):
    """An image cannot be read or is not accepted. The client gets the text, in a 400.

    `index` is that of the image among those of its request.
    """

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index
