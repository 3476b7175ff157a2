"""ImageError: why an image of a request was refused."""

from __future__ import annotations


class ImageError(Exception):
    """An image cannot be read or is not accepted. The client gets the text, in a 400."""
